"""A real engine process without a model: every step is answered at once, or at a fixed pace.

`python -m bench.instant_engine --report FILE [engine flags]`. Everything else is the product: threads, queues, gRPC. At
the end it writes what the loop's own time per step was, and how long the loop waited for the transport.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from pydantic import Field

from bench.instant_executor import InstantExecutor
from engine_core.config import EngineSettings
from engine_core.model_executor.executor import FailureCallback
from engine_core.output_queue import OutputQueue
from engine_core.process import EngineProcess
from engine_core.resolved_config import ServedModel
from engine_core.startup import LoadedModel, Progress
from stepwire import log


class InstantEngineSettings(EngineSettings):
    """The engine's flags, the pace of the steps, and where the report goes."""

    step_ms: float = Field(0.0, ge=0, description="A step takes this long; 0 = it is answered at once.")
    report: Path = Field(description="File for the report, written at the end.")


def main() -> int:
    settings = InstantEngineSettings.from_command_line()
    log.configure(settings.log_level, settings.log_format, "engine_core")
    executor = InstantExecutor(settings.num_blocks, settings.step_ms / 1000)
    waits_s = _time_waits()

    def load(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
        return LoadedModel(executor, ServedModel("instant", "", ""), b"")

    code = EngineProcess(settings, load).run()
    loop_us = {
        size: {"steps": len(gaps), "median": statistics.median(gaps) * 1e6, "best": min(gaps) * 1e6}
        for size, gaps in executor.gaps_s.items()
    }
    waited_us = {"mean": statistics.fmean(waits_s) * 1e6, "p99": statistics.quantiles(waits_s, n=100)[98] * 1e6}
    settings.report.write_text(json.dumps({"loop_us": loop_us, "waited_us": waited_us}))
    return code


def _time_waits() -> list[float]:
    """Note how long the loop waits for the transport at each hand-over: the time that it did not run itself."""
    waits: list[float] = []
    put = OutputQueue.put

    def timed(self: OutputQueue, *args: object) -> None:
        start, cpu_start = time.perf_counter(), time.thread_time()
        put(self, *args)  # type: ignore[arg-type]
        cpu_s = time.thread_time() - cpu_start
        waits.append(max(0.0, time.perf_counter() - start - cpu_s))

    OutputQueue.put = timed  # type: ignore[method-assign]
    return waits


if __name__ == "__main__":
    sys.exit(main())
