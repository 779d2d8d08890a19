"""The fake engine process that tells at its end what the garbage collector did while it had requests to serve."""

from __future__ import annotations

import gc
import logging
import sys
import time

from engine_core.process import EngineProcess
from fakes.fake_engine_process import FakeEngineSettings, load_fake
from stepwire import log

logger = logging.getLogger(__name__)


class CollectorRecord:
    """How often each generation was collected, and the longest pause, as long as requests are in the engine."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._started_s = 0.0
        self.num_collections = [0, 0, 0]
        self.longest_s = [0.0, 0.0, 0.0]

    def note(self, phase: str, info: dict[str, int]) -> None:
        """For gc.callbacks."""
        proc = self._process._proc
        if phase == "start":
            self._started_s = time.perf_counter()
        elif proc is not None and proc.core.scheduler.requests:
            generation = info["generation"]
            self.num_collections[generation] += 1
            self.longest_s[generation] = max(self.longest_s[generation], time.perf_counter() - self._started_s)


def main() -> int:
    settings = FakeEngineSettings.from_command_line()
    log.configure(settings.log_level, settings.log_format, "engine_core")
    process = EngineProcess(settings, load_fake)
    record = CollectorRecord(process)
    gc.callbacks.append(record.note)
    exit_code = process.run()
    for generation, (number, longest_s) in enumerate(zip(record.num_collections, record.longest_s, strict=True)):
        logger.info("generation %d: %d collections, the longest %.2f ms", generation, number, longest_s * 1e3)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
