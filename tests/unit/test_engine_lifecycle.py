"""The state machine, the counting of shutdown requests, and from an exception to a cause."""

from __future__ import annotations

import threading
from itertools import permutations, product
from unittest.mock import Mock

import pytest

from engine_core.core import StepError
from engine_core.core_proc import EngineCoreProc
from engine_core.death import describe_death, start_failure
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.messages import DeathCause
from engine_core.model_executor.executor import ExecutorFailedError, WorkerError
from engine_core.reason_counter import ReasonCounter
from engine_core.shutdown import ShutdownController
from stepwire.errors import InvariantViolation

PATHS = {
    EngineState.STARTING: [],
    EngineState.WARMING_UP: [EngineState.WARMING_UP],
    EngineState.RUNNING: [EngineState.WARMING_UP, EngineState.RUNNING],
    EngineState.PAUSED: [EngineState.WARMING_UP, EngineState.RUNNING, EngineState.PAUSED],
    EngineState.SLEEPING: [EngineState.WARMING_UP, EngineState.RUNNING, EngineState.PAUSED, EngineState.SLEEPING],
    EngineState.STALLED: [EngineState.WARMING_UP, EngineState.RUNNING, EngineState.STALLED],
    EngineState.DRAINING: [EngineState.DRAINING],
    EngineState.DEAD: [EngineState.DEAD],
}
SERVING = ("RUNNING", "PAUSED", "SLEEPING", "STALLED")
ALLOWED = {
    ("STARTING", "WARMING_UP"),
    ("WARMING_UP", "RUNNING"),
    *permutations(SERVING, 2),
    *product(("STARTING", "WARMING_UP", *SERVING), ("DRAINING", "DEAD")),
    ("DRAINING", "DEAD"),
}


@pytest.mark.parametrize(("old", "new"), list(product(EngineState, EngineState)))
def test_only_transitions_of_the_table_happen(old: EngineState, new: EngineState) -> None:
    lifecycle = EngineLifecycle()
    for state in PATHS[old]:
        assert lifecycle.move_to(state)
    assert lifecycle.move_to(new) == ((old.name, new.name) in ALLOWED)
    assert lifecycle.state is (new if (old.name, new.name) in ALLOWED else old)


@pytest.mark.parametrize("before", [EngineState.RUNNING, EngineState.PAUSED, EngineState.SLEEPING])
def test_the_end_of_a_stall_leads_back_to_where_it_began(before: EngineState) -> None:
    lifecycle = EngineLifecycle()
    for state in [*PATHS[before], EngineState.STALLED]:
        lifecycle.move_to(state)
    assert lifecycle.end_stall()
    assert lifecycle.state is before
    assert not lifecycle.end_stall()


def test_a_state_set_during_a_stall_ends_it() -> None:
    lifecycle = EngineLifecycle()
    for state in [*PATHS[EngineState.STALLED], EngineState.PAUSED]:
        lifecycle.move_to(state)
    assert not lifecycle.end_stall()
    assert lifecycle.state is EngineState.PAUSED


def test_listeners_hear_the_present_and_every_change() -> None:
    lifecycle, heard = EngineLifecycle(), []
    lifecycle.listen(heard.append)
    lifecycle.move_to(EngineState.WARMING_UP)
    lifecycle.move_to(EngineState.STALLED)
    assert heard == [EngineState.STARTING, EngineState.WARMING_UP]


def test_waiting_for_the_start_ends_with_it_or_with_time() -> None:
    lifecycle = EngineLifecycle()
    assert lifecycle.wait_started(0.0) is EngineState.STARTING
    states: list[EngineState] = []
    thread = threading.Thread(target=lambda: states.append(lifecycle.wait_started(None)))
    thread.start()
    lifecycle.move_to(EngineState.WARMING_UP)
    lifecycle.move_to(EngineState.RUNNING)
    thread.join(30)
    assert states == [EngineState.RUNNING]


def test_first_request_drains_second_aborts_later_ones_change_nothing() -> None:
    proc = Mock(spec=EngineCoreProc)
    controller = ShutdownController(30.0, Mock(), Mock())
    controller.attach(proc)
    for _ in range(4):
        controller.request("SIGTERM")
    assert [call.args for call in proc.request_shutdown.call_args_list] == [(30.0, "SIGTERM"), (0.0, "SIGTERM")]


def test_a_drain_by_a_utility_call_counts_as_the_first_signal() -> None:
    proc = Mock(spec=EngineCoreProc)
    controller = ShutdownController(30.0, Mock(), Mock())
    controller.attach(proc)
    controller.drain(None, "operator")
    controller.request("SIGTERM")
    assert [call.args for call in proc.request_shutdown.call_args_list] == [(30.0, "operator"), (0.0, "SIGTERM")]


def test_before_the_model_is_loaded_the_process_ends_at_once() -> None:
    before_exit, exit_process = Mock(), Mock()
    for end in ("request", "request_now"):
        controller = ShutdownController(30.0, before_exit, exit_process)
        getattr(controller, end)("SIGTERM")
        before_exit.assert_called()
        exit_process.assert_called_with(0)


def test_the_owners_end_does_not_drain() -> None:
    proc = Mock(spec=EngineCoreProc)
    controller = ShutdownController(30.0, Mock(), Mock())
    controller.attach(proc)
    controller.request_now("the parent process has ended")
    proc.request_shutdown.assert_called_once_with(0.0, "the parent process has ended")


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


@pytest.mark.regression(25)
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("boom"), DeathCause.STEP_FAILED),
        (OutOfMemoryError("boom"), DeathCause.OUT_OF_MEMORY),
        (MemoryError("boom"), DeathCause.OUT_OF_MEMORY),
        (InvariantViolation("boom"), DeathCause.INVARIANT),
    ],
)
def test_causes_of_death(error: Exception, cause: DeathCause) -> None:
    dead = describe_death(StepError(error, "report"), 7)
    assert (dead.cause, dead.cause_type, dead.message) == (cause, type(error).__name__, "boom")
    assert (dead.last_step, dead.report_id) == (7, "report")


@pytest.mark.parametrize(
    ("cause_type", "cause"),
    [
        ("WorkerError", DeathCause.EXECUTOR_FAILED),
        ("IndexError", DeathCause.EXECUTOR_FAILED),
        ("OutOfMemoryError", DeathCause.OUT_OF_MEMORY),
        ("InvariantViolation", DeathCause.INVARIANT),
    ],
)
def test_a_worker_that_fails_in_a_step_is_the_executors_failure(cause_type: str, cause: DeathCause) -> None:
    error = WorkerError("worker 1: boom", cause_type)
    reported = ExecutorFailedError("worker 1")
    reported.__cause__ = error
    for seen in (StepError(error, "report"), reported):
        dead = describe_death(seen, 7)
        assert (dead.cause, dead.cause_type, dead.message) == (cause, cause_type, "worker 1: boom")
    assert start_failure(error).cause_type == cause_type


def test_an_executor_failure_shows_what_the_worker_met() -> None:
    error = ExecutorFailedError("worker 1")
    error.__cause__ = ValueError("no device")
    dead = describe_death(error, 7)
    assert (dead.cause, dead.cause_type, dead.message) == (DeathCause.EXECUTOR_FAILED, "ValueError", "no device")


def test_a_failed_start_is_told_with_its_exception() -> None:
    dead = start_failure(ValueError("no such model"))
    assert (dead.cause, dead.cause_type, dead.message) == (DeathCause.INIT_FAILED, "ValueError", "no such model")


def test_reasons_count_from_zero() -> None:
    counter = ReasonCounter(("a", "b"))
    counter.add("a", 2)
    counter.add("a", 0)
    counter.add("c")
    assert counter.snapshot() == {"a": 2, "b": 0, "c": 1}
