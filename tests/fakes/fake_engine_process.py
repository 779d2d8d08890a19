"""The real engine process around the fake executor: `python -m fakes.fake_engine_process [engine flags]`.

Everything but the model is real: threads, queues, gRPC, signals, death. A prompt that starts with POISON_TOKEN kills
it, one that starts with HANG_TOKEN hangs its step.
"""

from __future__ import annotations

import sys

from engine_core.config import EngineSettings
from engine_core.model_executor.executor import FailureCallback
from engine_core.process import EngineProcess
from engine_core.resolved_config import ServedModel
from engine_core.startup import LoadedModel, Progress
from fakes.fake_executor import FakeExecutor
from stepwire import log


def load_fake(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
    progress("loading the fake model")
    return LoadedModel(FakeExecutor(settings, failure_callback), ServedModel("fake", "", ""), b"")


def main() -> int:
    settings = EngineSettings.from_command_line()
    log.configure(settings.log_level, settings.log_format, "engine_core")
    return EngineProcess(settings, load_fake).run()


if __name__ == "__main__":
    sys.exit(main())
