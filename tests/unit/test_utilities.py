"""The rules of utility calls: one answer each, time-outs, failures, drains; and what completes at once."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from engine_core import operations as op
from engine_core.core import EngineCore
from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from engine_core.messages import UtilityCall, UtilityResult
from engine_core.model_executor.executor import ExecutorFailedError
from engine_core.operations import PauseMode
from engine_core.scheduler.request_error import RequestError
from engine_core.utility_wire import decode_operation, encode_result
from engine_core.wire import encode_error
from fakes.fake_executor import FAILING_BATCH
from fakes.looped_engine import LoopedEngine
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import InvariantViolation, StepwireError
from stepwire.v1 import common_pb2


@pytest.fixture
def engine() -> LoopedEngine:
    return LoopedEngine()


def reason_of(outcome: object) -> str:
    assert isinstance(outcome, RequestError), outcome
    return outcome.reason


def test_every_operation_of_the_wire_is_decoded_to_one_that_has_a_handler(engine: LoopedEngine) -> None:
    decoded = set()
    for field in pb.UtilityCall.DESCRIPTOR.oneofs_by_name["call"].fields:
        call = pb.UtilityCall()
        args = getattr(call, field.name)
        args.SetInParent()
        if field.name in ("pause", "sleep"):
            setattr(args, "mode" if field.name == "pause" else "level", 1)
        decoded.add(type(decode_operation(call)))
    assert decoded == set(engine.proc.utilities._handlers)
    assert decoded == set(op.Operation.__args__)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (pb.UtilityCall(pause={}), "mode"),
        (pb.UtilityCall(pause={"mode": 9}), "mode"),
        (pb.UtilityCall(sleep={"pause_mode": 1}), "level"),
        (pb.UtilityCall(sleep={"level": 1, "pause_mode": 9}), "pause_mode"),
        (pb.UtilityCall(wake_up={"tags": [0]}), "tags"),
    ],
)
def test_values_that_are_not_known_are_refused_by_name(call: pb.UtilityCall, field: str) -> None:
    with pytest.raises(StepwireError, match=rf"^{field}: ") as caught:
        decode_operation(call)
    assert caught.value.reason == "FIELD_INVALID"


def test_reset_prefix_cache_counts_the_blocks_in_use_or_preempts(engine: LoopedEngine) -> None:
    engine.add(1, num_prompt=10, max_tokens=9)
    engine.add(2, num_prompt=10, max_tokens=9)
    engine.turn(2)
    assert engine.call(op.ResetPrefixCache()) == op.ResetPrefixCacheResult(is_reset=False, num_used_blocks=6)
    order = [request.key for request in engine.scheduler.running]
    call_id = engine.send(op.ResetPrefixCache(reset_running_requests=True))
    engine.turn()
    assert engine.results[call_id] == op.ResetPrefixCacheResult(is_reset=True, num_used_blocks=0)
    # Recomputed in the same turn, in the order they ran, without a hit.
    assert [request.key for request in engine.scheduler.running] == order
    assert engine.scheduler.stats().preempted_hit_tokens == 0
    engine.run()
    assert [len(tokens) for tokens in engine.tokens.values()] == [9, 9]
    assert engine.call(op.ResetPrefixCache()) == op.ResetPrefixCacheResult(is_reset=True, num_used_blocks=0)
    assert engine.scheduler.stats().num_cached_blocks == 0


def test_a_call_that_is_late_gets_deadline_exceeded_once(engine: LoopedEngine) -> None:
    engine.add(1, max_tokens=20)
    engine.turn()
    call_id = engine.send(op.Pause(PauseMode.WAIT), deadline=5.0)
    engine.turn()
    assert call_id not in engine.results
    engine.now = 5.0
    engine.turn()
    assert reason_of(engine.results[call_id]) == "DEADLINE"
    # The pause itself goes on, and its late result goes nowhere: a second answer would fail the test.
    engine.run()
    engine.turn()
    assert engine.call(op.IsPaused()) == op.IsPausedResult(PauseMode.WAIT, is_pending=False)


def test_a_call_that_waited_too_long_for_its_turn_is_not_run(engine: LoopedEngine) -> None:
    engine.now = 10.0
    call_id = engine.send(op.ExecuteDummyBatch(3), deadline=9.0)
    engine.turn()
    assert reason_of(engine.results[call_id]) == "DEADLINE"
    assert engine.executor.num_dummy_tokens == []


def test_an_idle_loop_wakes_up_for_the_deadline_of_a_call(engine: LoopedEngine) -> None:
    # Pending although nothing runs: as a call would be that waits for something outside.
    pending = engine.proc.utilities._pending
    call = UtilityCall("session", 7, op.IsPaused(), deadline=2.0)
    pending[call] = Future()
    engine.now = 2.0
    engine.wait()
    assert reason_of(engine.results[7]) == "DEADLINE"
    assert pending == {}


def test_a_failure_is_an_answer_and_the_engine_lives(engine: LoopedEngine) -> None:
    outcome = engine.call(op.ExecuteDummyBatch(FAILING_BATCH))
    assert (reason_of(outcome), outcome.cause_type) == ("UTILITY_FAILED", "RuntimeError")
    assert isinstance(engine.call(op.ExecuteDummyBatch(0)), op.ExecuteDummyBatchResult)
    assert engine.executor.num_dummy_tokens == [1]
    assert reason_of(engine.call(op.ExecuteDummyBatch(100_000))) == "FIELD_INVALID"


def test_a_broken_invariant_is_not_an_answer(engine: LoopedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EngineCore, *, reset_running_requests: bool) -> bool:
        raise InvariantViolation("boom")

    monkeypatch.setattr(EngineCore, "reset_prefix_cache", fail)
    engine.send(op.ResetPrefixCache())
    with pytest.raises(InvariantViolation):
        engine.turn()


def test_a_dummy_batch_that_leaves_the_workers_apart_ends_the_engine(
    engine: LoopedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise ExecutorFailedError("worker 1")

    monkeypatch.setattr(engine.executor, "execute_dummy_batch", fail)
    engine.send(op.ExecuteDummyBatch(3))
    with pytest.raises(ExecutorFailedError, match="worker 1"):
        engine.turn()


def test_looking_stays_possible_while_draining(engine: LoopedEngine) -> None:
    engine.add(1)
    engine.turn()
    engine.proc.request_shutdown(30.0, "test")
    answered = {engine.send(call) for call in (op.IsPaused(), op.IsSleeping(), op.CheckHealth(), op.DumpState())}
    refused = {engine.send(call) for call in (op.Resume(), op.Pause(PauseMode.KEEP), op.Drain(None, ""))}
    engine.proc.utilities.begin_drain()
    engine.turn()
    assert {call_id for call_id in refused if reason_of(engine.results[call_id]) == "DRAINING"} == refused
    assert not any(isinstance(engine.results[call_id], RequestError) for call_id in answered)


def test_drain_starts_the_shutdown_of_the_process(engine: LoopedEngine) -> None:
    engine.add(1)
    engine.turn()
    call_id = engine.send(op.Drain(4.0, "test"))
    engine.turn()
    assert engine.results[call_id] == op.DrainResult(num_requests=1)
    assert engine.drains == [(4.0, "test")]


def test_check_health_lists_every_worker(engine: LoopedEngine) -> None:
    workers = engine.call(op.CheckHealth()).workers
    assert [(worker.rank, worker.is_healthy) for worker in workers] == [(0, True), (1, False)]


def test_facts(engine: LoopedEngine) -> None:
    assert engine.call(op.GetSupportedTasks()) == op.GetSupportedTasksResult(("generate", "embed"))
    assert engine.call(op.GetKVCacheMetadata()) == op.GetKVCacheMetadataResult(4, 64, (KVCacheGroup(),))


def test_the_layout_of_the_kv_cache_on_the_wire() -> None:
    groups = (KVCacheGroup(4), KVCacheGroup(3, sliding_window=512))
    result = UtilityResult(7, op.GetKVCacheMetadataResult(16, 100, groups))
    message = encode_result(result, encode_error, common_pb2.ENGINE_STATE_RUNNING, "boot").get_kv_cache_metadata
    assert (message.block_size, message.num_blocks) == (16, 100)
    assert [(g.kind, g.block_size, g.num_layers, g.sliding_window) for g in message.groups] == [
        ("full", 16, 4, 0),
        ("sliding_window", 16, 3, 512),
    ]


def test_profiles_are_off_without_a_directory(engine: LoopedEngine) -> None:
    assert reason_of(engine.call(op.StartProfile())) == "PROFILING_OFF"
    assert reason_of(engine.call(op.StopProfile())) == "PROFILE_NOT_RUNNING"


def test_a_profile_is_started_once_and_stopped_once(tmp_path: Path) -> None:
    engine = LoopedEngine(profile_dir=tmp_path / "profiles")
    assert reason_of(engine.call(op.StopProfile())) == "PROFILE_NOT_RUNNING"
    for prefix in ("../x", "a/b", ".hidden", "x" * 65):
        assert reason_of(engine.call(op.StartProfile(prefix=prefix))) == "FIELD_INVALID"
    assert engine.call(op.StartProfile(prefix="mine")) == op.StartProfileResult(str(tmp_path / "profiles"))
    assert reason_of(engine.call(op.StartProfile())) == "PROFILE_RUNNING"
    (file,) = engine.call(op.StopProfile()).files
    assert Path(file).parent == tmp_path / "profiles"
    assert Path(file).name.startswith("mine-")
    assert reason_of(engine.call(op.StopProfile())) == "PROFILE_NOT_RUNNING"


def test_a_profile_stops_by_itself_after_its_steps(tmp_path: Path) -> None:
    engine = LoopedEngine(profile_dir=tmp_path)
    engine.call(op.StartProfile(num_steps=2))
    engine.add(1)
    engine.turn()
    assert list(tmp_path.iterdir()) == []
    engine.turn()
    assert len(list(tmp_path.iterdir())) == 1
    assert reason_of(engine.call(op.StopProfile())) == "PROFILE_NOT_RUNNING"


def test_steps_that_a_call_takes_in_count_for_the_profile(tmp_path: Path) -> None:
    engine = LoopedEngine(profile_dir=tmp_path, async_scheduling=True)
    engine.call(op.StartProfile(num_steps=3))
    engine.add(1, max_tokens=20)
    for _ in range(8):
        engine.send(op.IsPaused())
        engine.turn()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_profile_that_can_not_be_written_kills_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LoopedEngine(profile_dir=tmp_path)
    engine.call(op.StartProfile(num_steps=1))

    def fail(directory: Path, prefix: str) -> list[str]:
        raise OSError("disk full")

    monkeypatch.setattr(engine.executor, "stop_profile", fail)
    engine.add(1)
    engine.run()
    assert len(engine.tokens[1]) == 5


def test_half_a_character_in_an_error_can_be_sent():
    """A request may hold one, and the error quotes the request: it must not end the stream of all others."""
    encoded = encode_error(
        RequestError("GRAMMAR_INVALID", "#/properties/\ud800: not is not supported", cause_type="\udfff")
    )
    assert encoded.message == "#/properties/\\ud800: not is not supported"
    assert encoded.cause_type == "\\udfff"
    encoded.SerializeToString()
