"""The engine process around an executor that answers at once: `python -m bench.instant_engine [engine flags]`.

Queues, threads, gRPC, and the tokenizer that the frontend gets are the real ones.
"""

from __future__ import annotations

import sys

from bench.instant_executor import InstantExecutor
from engine_core.config import EngineSettings
from engine_core.model_executor.executor import FailureCallback
from engine_core.model_executor.model_source import resolve_model
from engine_core.process import EngineProcess
from engine_core.resolved_config import ServedModel
from engine_core.startup import LoadedModel, Progress
from stepwire import log, tokenizer_archive


def _load(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
    archive = tokenizer_archive.build(resolve_model(settings, progress).path)
    executor = InstantExecutor(has_thread=settings.async_scheduling)
    return LoadedModel(executor, ServedModel("instant", "", tokenizer_archive.sha256(archive)), archive)


if __name__ == "__main__":
    settings = EngineSettings.from_command_line()
    log.configure(settings.log_level, settings.log_format, "engine_core")
    sys.exit(EngineProcess(settings, _load).run())
