"""What the monitor sees and does, with an injected clock and no thread."""

from __future__ import annotations

import logging
from unittest.mock import Mock

import pytest

from engine_core.config import EngineSettings
from engine_core.core_proc import EngineCoreProc
from engine_core.kv_event_feed import KVEventFeed
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.messages import DeathCause, Pong
from engine_core.monitor import Monitor
from engine_core.output_queue import OutputQueue
from engine_core.request_traces import RequestTraces
from engine_core.scheduler.output import SchedulerStats
from engine_core.session import Session
from engine_core.sessions import Sessions
from engine_core.step_progress import StepProgress
from engine_core.step_times import StepTimes
from stepwire.tracing import WallClock


class World:
    """A monitor and everything it looks at."""

    def __init__(self, **settings: object) -> None:
        self.now = 0.0
        self.proc = Mock(spec=EngineCoreProc)
        self.proc.lifecycle = EngineLifecycle()
        for state in (EngineState.WARMING_UP, EngineState.RUNNING):
            self.proc.lifecycle.move_to(state)
        self.proc.progress = StepProgress(lambda: self.now)
        self.proc.output_queue = OutputQueue(lambda: self.now)
        self.proc.shutdown_deadline = None
        self.proc.kv_event_feed = None
        self.proc.latest_stats = SchedulerStats()
        self.proc.core = Mock(times=StepTimes(8, 64))
        self.sessions = Sessions(lambda: self.now)
        self.on_alive, self.on_hung = Mock(), Mock()
        self.monitor = Monitor(
            EngineSettings(**settings),  # type: ignore[arg-type]
            self.proc,
            self.sessions,
            self.on_alive,
            self.on_hung,
            lambda: self.now,
        )

    def check_at(self, now: float) -> None:
        self.now = now
        self.monitor.check()

    @property
    def state(self) -> EngineState:
        return self.proc.lifecycle.state


@pytest.fixture
def world() -> World:
    return World()


def test_a_long_step_stalls_the_engine_and_its_end_heals_it(world: World) -> None:
    world.proc.progress.begin()
    world.check_at(30.0)
    assert world.state is EngineState.RUNNING
    world.check_at(30.1)
    assert world.state is EngineState.STALLED
    world.on_alive.assert_called_with(True)
    world.proc.progress.end(1, 5)
    world.check_at(31.0)
    assert world.state is EngineState.RUNNING


def test_liveness_gives_up_two_minutes_after_stalled_and_the_watchdog_at_the_timeout(world: World) -> None:
    world.proc.progress.begin()
    world.check_at(150.0)
    world.on_alive.assert_called_with(False)
    world.on_hung.assert_not_called()
    world.check_at(300.1)
    assert world.on_hung.call_args.args[0].cause is DeathCause.STEP_TIMEOUT


def test_a_shutdown_that_the_loop_does_not_follow_is_ended(world: World) -> None:
    world.proc.shutdown_deadline = 10.0
    world.check_at(15.0)
    world.on_hung.assert_not_called()
    world.check_at(15.1)
    world.on_hung.assert_called_once()


def test_a_session_that_does_not_read_is_failed_and_then_cancelled(world: World) -> None:
    outbox = world.proc.output_queue.attach("slow")
    session = Session("slow", "client", outbox, RequestTraces(WallClock()))
    session.cancel_stream = Mock()
    world.sessions.open(session)
    world.proc.output_queue.put("slow", Pong(1, False, 0))
    world.check_at(30.0)
    assert session.error is None
    world.check_at(30.1)
    assert session.error is not None
    assert session.error.reason == "SLOW_CLIENT"
    session.cancel_stream.assert_not_called()
    world.check_at(31.0)
    session.cancel_stream.assert_called_once()


def test_an_orphan_is_shut_down_only_when_its_owner_is_the_session() -> None:
    for owner, is_ended in (("session", True), ("none", False)):
        world = World(owner=owner)
        world.check_at(60.0)
        world.proc.request_shutdown.assert_not_called()
        world.check_at(60.1)
        assert world.proc.request_shutdown.called == is_ended


def test_an_idle_engine_tells_its_state_every_five_seconds(world: World) -> None:
    for now, num_calls in ((4.9, 0), (5.0, 1), (9.9, 1), (10.0, 2)):
        world.check_at(now)
        assert world.proc.republish_stats.call_count == num_calls


def test_grammars_that_take_too_long_are_looked_for_at_every_look(world: World) -> None:
    world.check_at(1.0)
    world.check_at(2.0)
    assert world.proc.expire_grammars.call_count == 2


def test_subscribers_of_cache_events_that_hang_are_cut(world: World) -> None:
    world.proc.kv_event_feed = Mock(spec=KVEventFeed)
    world.check_at(1.0)
    world.proc.kv_event_feed.cut_hung.assert_called_once_with()


def test_a_busy_engine_has_one_line_of_figures_every_ten_seconds(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.proc.latest_stats = SchedulerStats(num_running=1)
    for second in range(1, 36):
        world.check_at(second)
    lines = [message for message in caplog.messages if "tok/s" in message]
    assert len(lines) == 3
