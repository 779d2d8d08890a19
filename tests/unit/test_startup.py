"""Start-up of the engine: whatever fails on the way, what was built is released."""

from __future__ import annotations

import pytest

from engine_core.config import EngineSettings
from engine_core.model_executor.startup_error import StartupError
from engine_core.resolved_config import ServedModel
from engine_core.startup import LoadedModel, start_engine
from fakes.fake_executor import FakeExecutor


@pytest.mark.regression("engine start error releases memory")
@pytest.mark.parametrize("place", ["determine_num_blocks", "initialize_kv_cache", "warm_up"])
@pytest.mark.parametrize("error", [StartupError("too small"), MemoryError(), KeyboardInterrupt()])
def test_a_start_that_fails_releases_the_executor(
    place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    settings = EngineSettings(num_blocks=64, max_model_len=-1)
    executor = FakeExecutor(settings, lambda _: None)
    monkeypatch.setattr(executor, place, fail)
    loaded = LoadedModel(executor, ServedModel("fake", "", ""), b"")
    with pytest.raises(type(error)):
        start_engine(settings, lambda *_: loaded, lambda _: None, lambda: None, lambda: 0.0)
    assert executor.is_shut_down


@pytest.mark.regression("engine start error releases memory")
def test_a_context_that_does_not_fit_releases_the_executor() -> None:
    settings = EngineSettings(num_blocks=2, max_model_len=4096)
    executor = FakeExecutor(settings, lambda _: None)
    loaded = LoadedModel(executor, ServedModel("fake", "", ""), b"")
    with pytest.raises(StartupError, match="max-model-len"):
        start_engine(settings, lambda *_: loaded, lambda _: None, lambda: None, lambda: 0.0)
    assert executor.is_shut_down
