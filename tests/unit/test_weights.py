"""Weights of a living engine: only while a pause holds, never half, and always under a version of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine_core import operations as op
from engine_core import weight_operations as wop
from engine_core.death import describe_death
from engine_core.messages import DeathCause
from engine_core.model_executor.executor import ExecutorFailedError
from engine_core.model_executor.startup_error import StartupError
from engine_core.operations import PauseMode, SleepLevel, WakeTag
from engine_core.scheduler.request_error import RequestError
from fakes.fake_executor import FAKE_WEIGHTS, FAKE_WEIGHTS_BYTES
from fakes.looped_engine import LoopedEngine

HEAD = np.array([1, 2, 3], np.float32).tobytes()
CHANGES = (
    wop.ReloadWeights(),
    wop.StartWeightUpdate("v2"),
    wop.UpdateWeights("v2", (wop.TensorPiece("head", "float32", (3,), 0, HEAD),)),
    wop.FinishWeightUpdate("v2"),
)
RELOAD, START, UPDATE, FINISH = CHANGES


def save(directory: Path, value: float = 0.0) -> Path:
    directory.mkdir(parents=True)
    save_file(
        {name: values + np.float32(value) for name, values in FAKE_WEIGHTS.items()}, directory / "model.safetensors"
    )
    return directory


@pytest.fixture
def engine(tmp_path: Path) -> LoopedEngine:
    return LoopedEngine(model_dir=save(tmp_path / "own"), trusted_dirs=f"{tmp_path}/other, {tmp_path}/trusted")


@pytest.fixture
def paused(engine: LoopedEngine) -> LoopedEngine:
    engine.call(op.Pause(PauseMode.KEEP))
    return engine


def reason_of(outcome: object) -> str:
    assert isinstance(outcome, RequestError), outcome
    return outcome.reason


def version(engine: LoopedEngine) -> str:
    return engine.call(wop.GetWeightVersion()).version


def test_a_staged_update_has_no_effect_before_its_finish(paused: LoopedEngine) -> None:
    assert paused.call(START) == wop.StartWeightUpdateResult("v2")
    assert paused.call(UPDATE) == wop.UpdateWeightsResult(1)
    assert (paused.executor.weights, version(paused)) == (FAKE_WEIGHTS_BYTES, "at-start")
    assert paused.call(FINISH) == wop.FinishWeightUpdateResult("v2")
    assert paused.executor.weights == {**FAKE_WEIGHTS_BYTES, "head": HEAD}
    assert version(paused) == "v2"


def test_a_discarded_update_leaves_everything_as_it_was(paused: LoopedEngine) -> None:
    paused.call(START)
    paused.call(UPDATE)
    assert paused.call(wop.FinishWeightUpdate("v2", discard=True)) == wop.FinishWeightUpdateResult("at-start")
    assert paused.executor.weights == FAKE_WEIGHTS_BYTES
    assert reason_of(paused.call(FINISH)) == "WEIGHT_UPDATE_UNKNOWN"


def test_a_running_engine_refuses(engine: LoopedEngine) -> None:
    for change in (RELOAD, START):
        assert reason_of(engine.call(change)) == "ENGINE_NOT_PAUSED"
    engine.add(1, max_tokens=20)
    engine.turn()
    # Running requests may go on: the pause does not hold yet.
    engine.send(op.Pause(PauseMode.WAIT))
    engine.turn()
    assert reason_of(engine.call(RELOAD)) == "ENGINE_NOT_PAUSED"


def test_an_engine_that_can_not_change_its_weights_refuses_before_anything_else(engine: LoopedEngine) -> None:
    engine.executor.can_change_weights = False
    for change in (RELOAD, START):
        assert reason_of(engine.call(change)) == "UNSUPPORTED_FEATURE"
    engine.call(op.Pause(PauseMode.KEEP))
    for change in (RELOAD, START):
        assert reason_of(engine.call(change)) == "UNSUPPORTED_FEATURE"
    assert engine.executor.loaded_from == []


def test_frozen_requests_are_computed_again_and_nothing_stays_cached(engine: LoopedEngine) -> None:
    engine.add(1, num_prompt=12, max_tokens=9)
    engine.turn(3)
    engine.call(op.Pause(PauseMode.KEEP))
    for change, expected in ((RELOAD, None), (START, 0), (UPDATE, 0), (FINISH, 0)):
        assert not isinstance(engine.call(change), RequestError)
        stats = engine.scheduler.stats()
        assert expected is None or (stats.num_cached_blocks, stats.num_used_blocks) == (0, 0)
    assert (engine.scheduler.stats().num_cached_blocks, engine.scheduler.stats().num_used_blocks) == (0, 0)
    engine.call(op.Resume())
    engine.run()
    assert len(engine.tokens[1]) == 9
    assert engine.scheduler.stats().preempted_hit_tokens == 0


@pytest.mark.parametrize("changes", [(RELOAD,), (START, UPDATE, FINISH)])
def test_every_change_empties_the_prefix_cache(engine: LoopedEngine, changes: tuple) -> None:
    engine.add(1, num_prompt=12)
    engine.run()
    assert engine.scheduler.stats().num_cached_blocks > 0
    engine.call(op.Pause(PauseMode.KEEP))
    for change in changes:
        assert not isinstance(engine.call(change), RequestError)
    assert engine.scheduler.stats().num_cached_blocks == 0


def test_a_reload_is_named_by_the_content_of_the_files(paused: LoopedEngine, tmp_path: Path) -> None:
    other = save(tmp_path / "trusted" / "deep" / "model", 1.0)
    first = paused.call(RELOAD)
    assert (first.num_bytes, paused.executor.loaded_from) == (44, [tmp_path / "own"])
    second = paused.call(wop.ReloadWeights(str(other)))
    assert second.version != first.version
    assert paused.call(wop.ReloadWeights(str(save(tmp_path / "other" / "copy")))).version == first.version
    assert version(paused) == paused.call(RELOAD).version == first.version


def test_a_sleep_that_drops_weights_remembers_where_the_last_came_from(paused: LoopedEngine, tmp_path: Path) -> None:
    other = save(tmp_path / "trusted" / "model", 1.0)
    reloaded = paused.call(wop.ReloadWeights(str(other))).version
    for change in (START, UPDATE, FINISH):
        paused.call(change)
    paused.call(op.Sleep(SleepLevel.DISCARD_ALL))
    paused.call(op.WakeUp(frozenset({WakeTag.WEIGHTS})))
    assert paused.executor.loaded_from == [other, other]
    # The update is lost, and the version says so.
    assert version(paused) == reloaded


def test_paths_outside_of_the_trusted_directories_are_refused(paused: LoopedEngine, tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    assert reason_of(paused.call(wop.ReloadWeights(own))) == "FIELD_INVALID"
    indexed = tmp_path / "trusted" / "indexed"
    indexed.mkdir(parents=True)
    index = {"weight_map": {"embed": "../../own/model.safetensors"}}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
    assert reason_of(paused.call(wop.ReloadWeights(str(indexed)))) == "FIELD_INVALID"
    paused.call(START)
    assert reason_of(paused.call(wop.UpdateWeights("v2", path=own))) == "FIELD_INVALID"
    assert paused.executor.loaded_from == []


def test_tensors_come_from_a_path_or_by_value(paused: LoopedEngine, tmp_path: Path) -> None:
    other = save(tmp_path / "trusted" / "model", 1.0)
    paused.call(START)
    assert reason_of(paused.call(wop.UpdateWeights("v2", UPDATE.pieces, str(other)))) == "FIELD_INVALID"
    assert paused.call(wop.UpdateWeights("v2", path=str(other))) == wop.UpdateWeightsResult(2)
    paused.call(FINISH)
    assert paused.executor.weights["head"] == np.ones(3, np.float32).tobytes()


def test_a_checkpoint_that_can_not_be_used_leaves_the_old_weights(paused: LoopedEngine, tmp_path: Path) -> None:
    empty = tmp_path / "trusted" / "empty"
    empty.mkdir(parents=True)
    assert reason_of(paused.call(wop.ReloadWeights(str(empty)))) == "WEIGHTS_UNUSABLE"
    paused.executor.weight_failure = StartupError("other shapes")
    outcome = paused.call(RELOAD)
    assert (reason_of(outcome), "other shapes" in outcome.message) == ("WEIGHTS_UNUSABLE", True)
    assert version(paused) == "at-start"
    assert paused.call(op.Resume()) == op.ResumeResult(is_resumed=True)


@pytest.mark.parametrize(
    ("changes", "failure"),
    [((START, UPDATE, FINISH), RuntimeError("boom")), ((RELOAD,), ExecutorFailedError("boom"))],
)
def test_a_change_that_fails_half_way_ends_the_engine(paused: LoopedEngine, changes: tuple, failure: Exception) -> None:
    *before, last = changes
    for change in before:
        paused.call(change)
    paused.executor.weight_failure = failure
    paused.send(last)
    with pytest.raises(ExecutorFailedError) as caught:
        paused.turn()
    assert describe_death(caught.value, 0).cause is DeathCause.EXECUTOR_FAILED


def test_an_open_update_holds_back_what_would_run_without_it(paused: LoopedEngine) -> None:
    paused.call(START)
    for operation in (op.Resume(), RELOAD, START, op.Sleep(SleepLevel.OFFLOAD_WEIGHTS)):
        assert reason_of(paused.call(operation)) == "WEIGHT_UPDATE_OPEN"
    assert reason_of(paused.call(FINISH)) == "WEIGHT_UPDATE_INCOMPLETE"
    paused.call(wop.FinishWeightUpdate("v2", discard=True))
    assert paused.call(op.Resume()) == op.ResumeResult(is_resumed=True)


def test_an_update_while_only_the_kv_cache_sleeps(paused: LoopedEngine) -> None:
    paused.call(op.Sleep(SleepLevel.OFFLOAD_WEIGHTS))
    for change in CHANGES:
        assert reason_of(paused.call(change)) == "ENGINE_SLEEPING"
    paused.call(op.WakeUp(frozenset({WakeTag.WEIGHTS})))
    for change in (START, UPDATE):
        assert not isinstance(paused.call(change), RequestError)
    assert reason_of(paused.call(op.WakeUp())) == "WEIGHT_UPDATE_OPEN"
    assert paused.call(FINISH) == wop.FinishWeightUpdateResult("v2")
    assert paused.call(op.WakeUp()) == op.WakeUpResult(frozenset())


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "../v", "at-start"])
def test_versions_are_plain_and_new(paused: LoopedEngine, name: str) -> None:
    assert reason_of(paused.call(wop.StartWeightUpdate(name))) == "FIELD_INVALID"


def test_calls_of_another_update_are_refused(paused: LoopedEngine) -> None:
    assert reason_of(paused.call(UPDATE)) == "WEIGHT_UPDATE_UNKNOWN"
    paused.call(START)
    for change in (wop.UpdateWeights("v1"), wop.FinishWeightUpdate("v1")):
        assert reason_of(paused.call(change)) == "WEIGHT_UPDATE_UNKNOWN"


def test_frontends_hear_of_the_version_before_any_token_that_shows_it(paused: LoopedEngine) -> None:
    paused.add(1)
    paused.call(START)
    paused.call(UPDATE)
    del paused.outputs[:]
    # In one turn of the loop, and a step at its end.
    for operation in (FINISH, op.Resume()):
        paused.send(operation)
    paused.turn()
    has_tokens = [any(output.new_token_ids for output in batch.outputs) for batch in paused.outputs]
    before = paused.outputs[: has_tokens.index(True)]
    assert [batch.stats.weight_version for batch in before if batch.stats][:1] == ["v2"]
    assert paused.proc.core.config.served_model.weight_version == "v2"


def test_a_shutdown_drops_an_open_update(paused: LoopedEngine) -> None:
    paused.add(1)
    paused.call(START)
    paused.call(UPDATE)
    paused.proc.request_shutdown(30.0, "test")
    paused.proc.run_busy_loop()
    assert paused.executor.weights == FAKE_WEIGHTS_BYTES
    assert paused.proc.core.config.served_model.weight_version == "at-start"


def test_a_model_of_text_has_no_encoder_caches_to_empty(engine: LoopedEngine) -> None:
    assert engine.call(op.ResetEncoderCache()) == op.ResetEncoderCacheResult()
