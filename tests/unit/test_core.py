"""EngineCore.step around the fake executor: what an abort during a step means, and how a failing step is told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from engine_core.config import EngineSettings
from engine_core.core import EngineCore, StepError
from engine_core.messages import Abort
from engine_core.resolved_config import ServedModel, resolve_config
from engine_core.scheduler.output import FinishReason, ModelRunnerOutput
from engine_core.structured_output.bitmask import GrammarBitmask
from fakes.fake_executor import FakeExecutor, next_token
from fakes.request_factory import make_request, request_key


class MeanwhileExecutor(FakeExecutor):
    """Calls `meanwhile` while a step runs, as other threads would."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        self.meanwhile()
        return super().sample_tokens(bitmask)


@pytest.fixture
def executor() -> MeanwhileExecutor:
    return MeanwhileExecutor(EngineSettings(num_blocks=64), lambda _: None)


@pytest.fixture
def core(executor: MeanwhileExecutor) -> EngineCore:
    settings = EngineSettings(max_model_len=-1, num_blocks=64)
    config = resolve_config(settings, ServedModel("fake", "", ""), executor.model_info, settings.num_blocks)
    return EngineCore(executor, config, lambda: 0.0)


def test_an_abort_during_the_final_step_wins_over_its_length(core: EngineCore, executor: MeanwhileExecutor) -> None:
    core.add_request(make_request(1, [5, 6, 7], max_tokens=1))
    executor.meanwhile = lambda: core.aborts_queue.put(Abort([request_key(1)], "requested"))
    outputs, _ = core.step()
    assert [output.finish.reason for output in outputs if output.finish] == [FinishReason.ABORTED]
    assert core.num_aborted.snapshot()["requested"] == 1


def test_the_end_of_the_only_request_reaches_the_workers_once(core: EngineCore, executor: MeanwhileExecutor) -> None:
    core.add_request(make_request(1, [5, 6, 7], max_tokens=9))
    core.step()
    core.abort_requests(None, "requested")
    while core.has_work:
        core.step()
    assert executor.finished_keys == [request_key(1)]
    assert executor.scheduler_outputs[-1].num_scheduled_tokens == {}
    assert executor.num_known_requests == 0


def test_steps_bring_the_tokens_of_the_model_and_leave_nothing(core: EngineCore) -> None:
    core.add_request(make_request(1, [5, 6, 7], max_tokens=4))
    tokens: list[int] = []
    while core.has_work:
        for output in core.step()[0]:
            tokens += output.new_token_ids
    known = [5, 6, 7]
    for _ in range(4):
        known.append(next_token(known))
    assert tokens == known[3:]
    assert core.scheduler.check_integrity() == []
    assert core.scheduler.kv_cache_manager.pool.num_used == 0


@pytest.mark.parametrize("place", ["schedule", "execute_model"])
def test_a_failure_anywhere_in_a_step_has_a_report(
    core: EngineCore, executor: MeanwhileExecutor, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ValueError("device lost")

    core.add_request(make_request(1, [5, 6, 7]))
    monkeypatch.setattr(core.scheduler if place == "schedule" else executor, place, fail)
    with pytest.raises(StepError) as caught:
        core.step()
    assert isinstance(caught.value.cause, ValueError)
    assert caught.value.report_id
