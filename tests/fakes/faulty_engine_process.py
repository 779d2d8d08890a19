"""The real engine, whose executor fails on a marked prompt: `python -m fakes.faulty_engine_process`."""

from __future__ import annotations

import sys

from engine_core.__main__ import load_model
from engine_core.config import EngineSettings
from engine_core.model_executor.executor import FailureCallback
from engine_core.process import EngineProcess
from engine_core.scheduler.output import SchedulerOutput
from engine_core.startup import LoadedModel, Progress
from stepwire import log

# A prompt of exactly these ids makes the step that first sees it fail.
MARKED_PROMPT = [7, 7, 7]


def load_faulty(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
    loaded = load_model(settings, failure_callback, progress)
    execute_model = loaded.executor.execute_model

    def fail_if_marked(scheduler_output: SchedulerOutput) -> None:
        if any(new.prompt_token_ids == MARKED_PROMPT for new in scheduler_output.new_requests):
            raise RuntimeError("injected failure")
        execute_model(scheduler_output)

    loaded.executor.execute_model = fail_if_marked  # type: ignore[method-assign]
    return loaded


if __name__ == "__main__":
    engine_settings = EngineSettings.from_command_line()
    log.configure(engine_settings.log_level, engine_settings.log_format, "engine_core")
    sys.exit(EngineProcess(engine_settings, load_faulty).run())
