"""Sleeping: levels, parts, and what an engine without its memory refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from engine_core import operations as op
from engine_core.lifecycle import EngineState
from engine_core.model_executor.executor import ExecutorFailedError, MemoryPart
from engine_core.operations import PauseMode, SleepLevel, WakeTag
from engine_core.scheduler.output import FinishReason
from engine_core.scheduler.request_error import RequestError
from fakes.fake_executor import FAKE_WEIGHTS
from fakes.looped_engine import LoopedEngine
from stepwire.errors import InvariantViolation

ALL = frozenset(WakeTag)


@pytest.fixture
def engine() -> LoopedEngine:
    return LoopedEngine()


def reason_of(outcome: object) -> str:
    assert isinstance(outcome, RequestError), outcome
    return outcome.reason


def offload(mode: PauseMode | None = PauseMode.KEEP) -> op.Sleep:
    return op.Sleep(SleepLevel.OFFLOAD_WEIGHTS, mode)


def test_offload_gives_memory_back_and_a_frozen_request_goes_on_after_waking(engine: LoopedEngine) -> None:
    alone = LoopedEngine()
    for one in (engine, alone):
        one.add(1, max_tokens=12)
    alone.run()
    engine.turn(4)
    assert engine.call(offload()) == op.SleepResult(freed_bytes=2000)
    assert engine.state is EngineState.SLEEPING
    assert engine.executor.released == set(MemoryPart)
    assert engine.call(op.IsSleeping()) == op.IsSleepingResult(SleepLevel.OFFLOAD_WEIGHTS, ALL)
    stats = engine.scheduler.stats()
    assert (stats.num_used_blocks, stats.num_cached_blocks) == (0, 0)

    assert engine.call(op.WakeUp()) == op.WakeUpResult(frozenset())
    assert engine.state is EngineState.RUNNING
    assert engine.executor.released == set()
    engine.run()
    assert engine.tokens == alone.tokens


def test_sleep_waits_for_the_pause(engine: LoopedEngine) -> None:
    engine.add(1)
    engine.turn()
    call_id = engine.send(offload(PauseMode.WAIT))
    engine.turn()
    assert call_id not in engine.results
    assert engine.executor.released == set()
    assert reason_of(engine.call(op.WakeUp())) == "PAUSE_PENDING"
    engine.run()
    engine.turn()
    assert engine.results[call_id] == op.SleepResult(2000)
    assert engine.finishes[1].reason is FinishReason.LENGTH


def test_pause_only_keeps_the_memory(engine: LoopedEngine) -> None:
    assert engine.call(op.Sleep(SleepLevel.PAUSE_ONLY, PauseMode.ABORT)) == op.SleepResult(0)
    assert engine.state is EngineState.SLEEPING
    assert engine.executor.released == set()
    assert engine.call(op.IsSleeping()) == op.IsSleepingResult(SleepLevel.PAUSE_ONLY, frozenset({WakeTag.SCHEDULING}))
    assert engine.call(op.WakeUp()) == op.WakeUpResult(frozenset())
    assert engine.call(op.IsSleeping()) == op.IsSleepingResult(None, frozenset())
    assert engine.state is EngineState.RUNNING


def test_scheduling_resumes_only_when_nothing_sleeps(engine: LoopedEngine) -> None:
    engine.call(offload())
    engine.add(1)
    # Asked for too early it stays asleep.
    assert engine.call(op.WakeUp(frozenset({WakeTag.SCHEDULING}))) == op.WakeUpResult(ALL)
    weights = op.WakeUp(frozenset({WakeTag.WEIGHTS}))
    assert engine.call(weights) == op.WakeUpResult(frozenset({WakeTag.KV_CACHE, WakeTag.SCHEDULING}))
    assert engine.executor.released == {MemoryPart.KV_CACHE}
    kv_cache = op.WakeUp(frozenset({WakeTag.KV_CACHE}))
    assert engine.call(kv_cache) == op.WakeUpResult(frozenset({WakeTag.SCHEDULING}))
    assert engine.tokens[1] == []
    assert engine.state is EngineState.SLEEPING
    assert engine.call(op.WakeUp(frozenset({WakeTag.SCHEDULING}))) == op.WakeUpResult(frozenset())
    engine.run()
    assert len(engine.tokens[1]) == 5


def test_what_needs_an_awake_engine_is_refused(engine: LoopedEngine) -> None:
    engine.call(offload())
    for operation in (op.Resume(), op.ExecuteDummyBatch(1), op.Sleep(SleepLevel.PAUSE_ONLY, PauseMode.KEEP)):
        assert reason_of(engine.call(operation)) == "ENGINE_SLEEPING"
    # The same again is no error.
    assert engine.call(offload()) == op.SleepResult(0)


def test_a_sleep_without_mode_needs_a_pause(engine: LoopedEngine) -> None:
    assert reason_of(engine.call(offload(None))) == "FIELD_INVALID"
    engine.call(op.Pause(PauseMode.KEEP))
    assert reason_of(engine.call(offload(PauseMode.ABORT))) == "ENGINE_PAUSED"
    assert engine.call(offload(None)) == op.SleepResult(2000)


def test_discarded_weights_come_back_from_disk(tmp_path: Path) -> None:
    save_file(FAKE_WEIGHTS, tmp_path / "model.safetensors")
    engine = LoopedEngine(model_dir=tmp_path)
    engine.add(1, max_tokens=12)
    engine.turn(4)
    assert engine.call(op.Sleep(SleepLevel.DISCARD_ALL, PauseMode.KEEP)) == op.SleepResult(500 + 1000)
    assert (engine.executor.weights, engine.executor.released) == ({}, {MemoryPart.KV_CACHE})
    assert engine.call(op.IsSleeping()) == op.IsSleepingResult(SleepLevel.DISCARD_ALL, ALL)

    engine.call(op.WakeUp(frozenset({WakeTag.WEIGHTS})))
    assert engine.executor.loaded_from == [tmp_path]
    assert engine.call(op.WakeUp()) == op.WakeUpResult(frozenset())
    assert engine.executor.loaded_from == [tmp_path]
    engine.run()
    assert len(engine.tokens[1]) == 12


def test_weights_that_could_not_come_back_are_not_dropped_and_nothing_is_paused(engine: LoopedEngine) -> None:
    engine.executor.can_change_weights = False
    engine.add(1)
    engine.turn(2)
    assert reason_of(engine.call(op.Sleep(SleepLevel.DISCARD_ALL, PauseMode.ABORT))) == "UNSUPPORTED_FEATURE"
    assert engine.state is EngineState.RUNNING
    engine.run()
    assert engine.finishes[1].reason is FinishReason.LENGTH
    assert engine.call(offload()) == op.SleepResult(freed_bytes=2000)


def test_weights_that_are_gone_from_disk_stay_asleep(tmp_path: Path) -> None:
    engine = LoopedEngine(model_dir=tmp_path)
    engine.call(op.Sleep(SleepLevel.DISCARD_ALL, PauseMode.KEEP))
    assert reason_of(engine.call(op.WakeUp())) == "WEIGHTS_UNUSABLE"
    assert engine.call(op.IsSleeping()).asleep == ALL
    save_file(FAKE_WEIGHTS, tmp_path / "model.safetensors")
    assert engine.call(op.WakeUp()) == op.WakeUpResult(frozenset())
    assert engine.state is EngineState.RUNNING


def test_waking_an_awake_engine_changes_nothing(engine: LoopedEngine) -> None:
    engine.call(op.Pause(PauseMode.KEEP))
    assert engine.call(op.WakeUp()) == op.WakeUpResult(frozenset())
    assert engine.state is EngineState.PAUSED


def test_memory_that_can_not_be_had_back_stays_asleep(engine: LoopedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.call(offload())

    def fail(part: MemoryPart) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "restore_memory", fail)
        outcome = engine.call(op.WakeUp())
    assert (reason_of(outcome), outcome.cause_type) == ("UTILITY_FAILED", "MemoryError")
    assert engine.call(op.IsSleeping()).asleep == ALL
    engine.call(op.WakeUp())
    assert engine.state is EngineState.RUNNING


def test_a_sleep_that_fails_half_way_can_be_woken_up(engine: LoopedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    release = engine.executor.release_memory

    def fail_for_kv_cache(part: MemoryPart) -> int:
        if part is MemoryPart.KV_CACHE:
            raise RuntimeError("boom")
        return release(part)

    monkeypatch.setattr(engine.executor, "release_memory", fail_for_kv_cache)
    assert reason_of(engine.call(offload())) == "UTILITY_FAILED"
    assert engine.state is EngineState.SLEEPING
    # Also what failed: it may have got half way.
    assert engine.call(op.IsSleeping()).asleep == ALL
    assert engine.call(op.WakeUp()) == op.WakeUpResult(frozenset())
    assert engine.executor.released == set()
    assert engine.state is EngineState.RUNNING


@pytest.mark.parametrize("error", [InvariantViolation("torn"), ExecutorFailedError("gone")])
def test_a_release_that_breaks_the_engine_ends_it(
    engine: LoopedEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(part: MemoryPart) -> int:
        raise error

    monkeypatch.setattr(engine.executor, "release_memory", fail)
    with pytest.raises(type(error)):
        engine.call(offload())


def test_the_watchdog_sees_memory_being_given_back(engine: LoopedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ages: list[float] = []
    release = engine.executor.release_memory

    def watched_release(part: MemoryPart) -> int:
        ages.append(engine.proc.progress.age_s())
        return release(part)

    monkeypatch.setattr(engine.executor, "release_memory", watched_release)
    engine.call(offload())
    assert len(ages) == 2
    assert min(ages) > 0


def test_a_shutdown_aborts_what_a_sleeping_engine_can_not_finish(engine: LoopedEngine) -> None:
    engine.add(1)
    engine.turn(2)
    engine.call(offload())
    engine.proc.request_shutdown(30.0, "test")
    engine.proc.run_busy_loop()
    engine._collect()
    assert engine.finishes[1].reason is FinishReason.ABORTED
