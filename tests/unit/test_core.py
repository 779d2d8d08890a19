"""EngineCore.step around the fake executor, one step after the other and one ahead: order, aborts, failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from engine_core.config import EngineSettings
from engine_core.core import EngineCore, StepError
from engine_core.messages import Abort
from engine_core.resolved_config import ServedModel, resolve_config
from engine_core.scheduler.output import EngineCoreOutput, FinishReason, ModelRunnerOutput, SchedulerOutput
from engine_core.structured_output.bitmask import GrammarBitmask
from fakes.fake_executor import NAN_TOKEN, FakeExecutor, next_token
from fakes.request_factory import make_request, request_key
from stepwire.errors import InvariantViolation


class MeanwhileExecutor(FakeExecutor):
    """Calls `meanwhile` while a step runs, as other threads would, and notes the steps that were started."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)
    started: list[SchedulerOutput]

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.started.append(scheduler_output)
        super().execute_model(scheduler_output)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        self.meanwhile()
        return super().sample_tokens(bitmask)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def executor(request: pytest.FixtureRequest) -> Iterator[MeanwhileExecutor]:
    yield from make_executor(is_async=request.param)


@pytest.fixture
def ahead() -> Iterator[MeanwhileExecutor]:
    """An executor for two steps in flight, whose gate is closed."""
    for executor in make_executor(is_async=True):
        executor.gate.clear()
        yield executor


def make_executor(*, is_async: bool, **settings: bool) -> Iterator[MeanwhileExecutor]:
    executor = MeanwhileExecutor(EngineSettings(num_blocks=64, async_scheduling=is_async, **settings), lambda _: None)
    executor.started = []
    yield executor
    executor.gate.set()
    executor.shutdown()


@pytest.fixture
def core(executor: MeanwhileExecutor) -> EngineCore:
    return make_core(executor)


def make_core(executor: MeanwhileExecutor, clock: Callable[[], float] = lambda: 0.0) -> EngineCore:
    settings = EngineSettings(max_model_len=-1, num_blocks=64)
    config = resolve_config(settings, ServedModel("fake", "", ""), executor.model_info, settings.num_blocks)
    return EngineCore(executor, config, clock)


@pytest.mark.regression(5)
def test_an_abort_during_the_final_step_wins_over_its_length(core: EngineCore, executor: MeanwhileExecutor) -> None:
    core.add_request(make_request(1, [5, 6, 7], max_tokens=1))
    executor.meanwhile = lambda: core.aborts_queue.put(Abort([request_key(1)], "requested"))
    outputs = run(core)
    assert [output.finish.reason for output in outputs if output.finish] == [FinishReason.ABORTED]
    assert core.num_aborted.snapshot()["requested"] == 1


@pytest.mark.regression(4)
def test_the_end_of_the_only_request_reaches_the_workers_once(core: EngineCore, executor: MeanwhileExecutor) -> None:
    core.add_request(make_request(1, [5, 6, 7], max_tokens=9))
    core.step()
    core.abort_requests(None, "requested")
    run(core)
    assert executor.finished_keys == [request_key(1)]
    assert executor.scheduler_outputs[-1].num_scheduled_tokens == {}
    assert executor.num_known_requests == 0


@pytest.mark.regression(3)
def test_a_request_id_can_be_used_again_while_the_aborted_one_is_in_a_step(ahead: MeanwhileExecutor) -> None:
    """The id is for people; the handle is the key, and the step in flight brings nothing to the new one."""
    core = make_core(ahead)
    core.add_request(make_request(1, [5, 6, 7], max_tokens=9))
    core.step()
    [aborted] = core.abort_requests([request_key(1)], "requested")
    again = make_request(2, [8, 9], max_tokens=3)
    again.request_id = "request-1"
    core.add_request(again)
    ahead.gate.set()
    outputs = run(core)
    assert aborted.finish is not None
    assert {output.key for output in outputs} == {request_key(2)}
    known = [8, 9]
    for _ in range(3):
        known.append(next_token(known))
    assert [token_id for output in outputs for token_id in output.new_token_ids] == known[2:]
    assert ahead.finished_keys == [request_key(1), request_key(2)]


def test_steps_bring_the_tokens_of_the_model_and_leave_nothing(core: EngineCore) -> None:
    core.add_request(make_request(1, [5, 6, 7], max_tokens=4))
    tokens = [token_id for output in run(core) for token_id in output.new_token_ids]
    known = [5, 6, 7]
    for _ in range(4):
        known.append(next_token(known))
    assert tokens == known[3:]
    assert core.scheduler.check_integrity() == []
    assert core.scheduler.kv_cache_manager.pool.num_used == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_corrupted_request_is_counted_and_told_once(is_async: bool, caplog: pytest.LogCaptureFixture) -> None:
    for executor in make_executor(is_async=is_async, check_nan=True):
        core = make_core(executor)
        core.add_request(make_request(1, [NAN_TOKEN, 6, 7], max_tokens=5))
        core.add_request(make_request(2, [5, 6, 7], max_tokens=5))
        # Its only token is the bad one.
        core.add_request(make_request(3, [NAN_TOKEN], max_tokens=1))
        run(core)
        assert core.scheduler.stats().num_corrupted == 2
        told = [record for record in caplog.records if "NaN" in record.getMessage()]
        assert [record.__dict__["request_id"] for record in told] == ["request-1", "request-3"]
        assert {record.levelname for record in told} == {"WARNING"}
        caplog.clear()


def test_a_request_is_not_corrupted_by_its_predecessor_of_the_same_handle() -> None:
    for executor in make_executor(is_async=True, check_nan=True):
        executor.gate.clear()
        core = make_core(executor)
        core.add_request(make_request(1, [NAN_TOKEN, 6], max_tokens=5))
        core.step()
        core.abort_requests([request_key(1)], "requested")
        core.add_request(make_request(1, [5, 6], max_tokens=2))
        executor.gate.set()
        run(core)
        assert core.scheduler.stats().num_corrupted == 0


def test_a_request_that_has_ended_is_not_counted_as_corrupted() -> None:
    for executor in make_executor(is_async=False, check_nan=True):
        core = make_core(executor)
        core.add_request(make_request(1, [NAN_TOKEN, 6], max_tokens=5))
        executor.meanwhile = partial(core.aborts_queue.put, Abort([request_key(1)], "requested"))
        run(core)
        assert core.scheduler.stats().num_corrupted == 0


def run(core: EngineCore) -> list[EngineCoreOutput]:
    outputs: list[EngineCoreOutput] = []
    while core.has_work:
        outputs += core.step()[0]
    return outputs


def test_the_next_step_starts_before_the_last_one_is_taken_in(ahead: MeanwhileExecutor) -> None:
    core = make_core(ahead)
    core.add_request(make_request(1, [5, 6, 7], max_tokens=4))
    # A call that only fills brings nothing and does not wait: the gate is closed.
    assert core.step() == ([], False)
    assert core.scheduler.requests[request_key(1)].num_in_flight_tokens == 1
    ahead.gate.set()
    outputs, has_model_run = core.step()
    assert (len(ahead.started), has_model_run) == (2, True)
    assert [len(output.new_token_ids) for output in outputs] == [1]
    assert ahead.started[1].num_scheduled_tokens == {request_key(1): 1}


def test_no_step_is_started_for_what_follows_the_last_token(core: EngineCore, executor: MeanwhileExecutor) -> None:
    core.add_request(make_request(1, [5, 6, 7], max_tokens=3))
    run(core)
    assert [step.total_num_scheduled_tokens for step in executor.started] == [3, 1, 1, 0]


def test_settling_takes_in_every_step_in_flight(ahead: MeanwhileExecutor) -> None:
    core = make_core(ahead)
    core.add_request(make_request(1, [5, 6, 7], max_tokens=9))
    core.step()
    ahead.gate.set()
    core.step()
    [output] = core.settle()
    assert len(output.new_token_ids) == 1
    assert core.scheduler.requests[request_key(1)].num_in_flight_tokens == 0
    assert core.settle() == []


def test_a_reset_that_preempts_comes_after_the_steps_in_flight(ahead: MeanwhileExecutor) -> None:
    core = make_core(ahead)
    core.add_request(make_request(1, [5, 6, 7], max_tokens=3))
    core.step()
    with pytest.raises(InvariantViolation, match="during its step 1"):
        core.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.regression(8)
def test_the_end_of_a_request_in_flight_is_sent_behind_its_step(ahead: MeanwhileExecutor) -> None:
    core = make_core(ahead)
    core.add_request(make_request(1, [5, 6, 7], max_tokens=3))
    core.step()
    [ended] = core.abort_requests(None, "requested")
    assert ended.finish is not None
    assert core.scheduler.stats().num_used_blocks > 0
    ahead.gate.set()
    assert run(core) == []
    assert ahead.finished_keys == [request_key(1)]
    assert core.scheduler.stats().num_used_blocks == 0


def test_an_end_by_deadline_needs_no_step(executor: MeanwhileExecutor) -> None:
    now = [0.0]
    core = make_core(executor, lambda: now[0])
    core.add_request(make_request(1, [5, 6, 7], max_tokens=9, deadline=5.0))
    now[0] = 5.0
    outputs, has_model_run = core.step()
    assert [output.finish.error.reason for output in outputs if output.finish and output.finish.error] == ["DEADLINE"]
    assert (has_model_run, executor.started) == (False, [])


@pytest.mark.parametrize("place", ["schedule", "execute_model", "_run_forward", "_run_sampling"])
def test_a_failure_anywhere_in_a_step_has_a_report(
    core: EngineCore, executor: MeanwhileExecutor, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("device lost")

    core.add_request(make_request(1, [5, 6, 7], max_tokens=2))
    monkeypatch.setattr(core.scheduler if place == "schedule" else executor, place, fail)
    with pytest.raises(StepError) as caught:
        run(core)
    assert isinstance(caught.value.cause, ValueError)
    assert caught.value.report_id
