"""The real engine process around the fake executor: `python -m fakes.fake_engine_process [engine flags]`.

Everything but the model is real: threads, queues, gRPC, signals, death. The special tokens of the fake executor make
steps fail, hang or take time; two flags do the same for the load.
"""

from __future__ import annotations

import sys
import threading

from pydantic import Field

from engine_core.config import EngineSettings
from engine_core.model_executor.executor import FailureCallback
from engine_core.model_executor.startup_error import StartupError
from engine_core.process import EngineProcess
from engine_core.resolved_config import ServedModel
from engine_core.startup import LoadedModel, Progress
from fakes.fake_executor import FAKE_VOCABULARY, SLOW_STEP_S, WHOLE_VOCABULARY, FakeExecutor
from stepwire import log


class FakeEngineSettings(EngineSettings):
    """The engine's flags, and how its load goes."""

    fake_load_s: float = Field(0.0, description="The load takes this long.")
    fake_slow_step_s: float = Field(SLOW_STEP_S, description="Steps with a slow prompt take this long.")
    fake_grammars: bool = Field(False, description="The model's vocabulary is known: structured output is on.")
    fake_poisons: bool = Field(True, description="Tokens that make steps fail or hang do so.")
    fake_bytes: bool = Field(False, description="With fake_grammars: the vocabulary has every byte.")
    fake_load_error: str = Field("", description="The load ends with this StartupError.")


def load_fake(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
    assert isinstance(settings, FakeEngineSettings)
    progress("loading the fake model")
    threading.Event().wait(settings.fake_load_s)
    if settings.fake_load_error:
        raise StartupError(settings.fake_load_error)
    known = WHOLE_VOCABULARY if settings.fake_bytes else FAKE_VOCABULARY
    vocabulary = known if settings.fake_grammars else None
    executor = FakeExecutor(settings, failure_callback)
    executor.slow_step_s = settings.fake_slow_step_s
    executor.has_poisons = settings.fake_poisons
    return LoadedModel(executor, ServedModel("fake", "", ""), b"", vocabulary)


def main() -> int:
    settings = FakeEngineSettings.from_command_line()
    log.configure(settings.log_level, settings.log_format, "engine_core")
    return EngineProcess(settings, load_fake).run()


if __name__ == "__main__":
    sys.exit(main())
