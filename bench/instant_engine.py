"""A real engine process without a model: every step is answered at once, or at a fixed pace.

`python bench/instant_engine.py --report FILE [engine flags]`. Everything else is the product: threads, queues, gRPC. At
the end it writes what the loop's own time per step was, and how long the loop waited for the transport.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path

from pydantic import Field

from engine_core.config import EngineSettings
from engine_core.model_executor.executor import FailureCallback, ModelInfo
from engine_core.output_queue import OutputQueue
from engine_core.process import EngineProcess
from engine_core.resolved_config import ServedModel
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.startup import LoadedModel, Progress
from engine_core.structured_output.bitmask import GrammarBitmask
from stepwire import log

VOCAB_SIZE = 49152
# Ordinary words and pieces of words of the tokenizer, no special tokens.
FIRST_TOKEN, NUM_TOKENS = 300, 20_000


class InstantEngineSettings(EngineSettings):
    """The engine's flags, the pace of the steps, and where the report goes."""

    step_ms: float = Field(0.0, ge=0, description="A step takes this long; 0 = it is answered at once.")
    report: Path = Field(description="File for the report, written at the end.")


class InstantExecutor:
    """Samples for every scheduled request; notes the time from each answer to the next call."""

    def __init__(self, settings: InstantEngineSettings) -> None:
        self.gaps_s: dict[int, list[float]] = defaultdict(list)
        self._step_s = settings.step_ms / 1000
        self._num_blocks = settings.num_blocks
        self._answered: float | None = None
        self._output = ModelRunnerOutput([], [])

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            architecture="Instant",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            implementation="instant",
            max_position_embeddings=4096,
            num_layers=1,
            kv_bytes_per_token=1,
            weight_bytes=0,
        )

    @property
    def max_concurrent_batches(self) -> int:
        return 1

    def determine_num_blocks(self, block_size: int) -> int:
        return self._num_blocks

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        keys = list(scheduler_output.num_scheduled_tokens)
        if self._answered is not None:
            self.gaps_s[len(keys)].append(time.perf_counter() - self._answered)
        # Every prompt fits one step, so every scheduled request samples. Neighbours get different tokens.
        first = scheduler_output.step * 7919
        token_ids = [[FIRST_TOKEN + (first + 31 * place) % NUM_TOKENS] for place in range(len(keys))]
        self._output = ModelRunnerOutput(keys, token_ids)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        if self._step_s:
            time.sleep(self._step_s)
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._output)
        self._answered = time.perf_counter()
        return future

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def main() -> int:
    settings = InstantEngineSettings.from_command_line()
    log.configure(settings.log_level, settings.log_format, "engine_core")
    executor = InstantExecutor(settings)
    waits_s = _time_waits()

    def load(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
        return LoadedModel(executor, ServedModel("instant", "", ""), b"")

    code = EngineProcess(settings, load).run()
    loop_us = {
        size: {"steps": len(gaps), "median": statistics.median(gaps) * 1e6, "best": min(gaps) * 1e6}
        for size, gaps in executor.gaps_s.items()
    }
    waited_us = {"median": statistics.median(waits_s) * 1e6, "mean": statistics.fmean(waits_s) * 1e6}
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
