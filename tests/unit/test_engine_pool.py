"""The pool without sockets: routes, picking, second tries, losses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from frontend.abort_kind import AbortKind
from frontend.engine_client.balancer import PickReason
from frontend.engine_client.connection import EngineConnection
from frontend.engine_client.connection_state import (
    REFUSAL_REASONS,
    ClientIdentity,
    ConnectionState,
    EngineRefusedError,
)
from frontend.engine_client.engine_facts import EngineFacts, EngineLoad, EngineState, strictest
from frontend.engine_client.outbox import NewRequest, Outbox
from frontend.engine_client.pool import EnginePool
from frontend.engine_client.tokenizer_store import TokenizerStore
from frontend.engine_outputs import EngineEvent, EngineFinish, EngineFinishReason, EngineOutput
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    StepwireError,
    UnavailableError,
)


def facts(engine_id: str, **changes: object) -> EngineFacts:
    values = {
        "engine_id": engine_id, "boot_id": "b", "model": "m", "revision": "", "tokenizer_sha256": "t",
        "max_model_len": 100, "vocab_size": 10, "architecture": "FakeForCausalLM", "dtype": "float32",
        "block_size": 16, "kv_cache_tokens": 1000,
        "max_num_seqs": 8, "max_logprobs": 20,
        "version": "1", "weight_version": "", "ping_interval_s": 5.0, "ping_timeout_s": 15.0,
        "state": EngineState.RUNNING,
    }  # fmt: skip
    return EngineFacts(**{**values, **changes})


class Listener:
    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.failed: list[tuple[list[int], StepwireError]] = []
        self.attached: list[EngineFacts] = []
        self.picked: list[PickReason] = []
        self.limits: list[EngineFacts] = []
        # Outputs are taken one by one, each only when something is in here.
        self.turns: asyncio.Queue[None] | None = None

    async def on_attach(self, facts: EngineFacts, tokenizer_dir: Path) -> None:
        self.attached.append(facts)

    async def on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            if self.turns is not None:
                await self.turns.get()
            self.outputs.append(output)

    def on_failed(self, handles: list[int], error: StepwireError) -> None:
        self.failed.append((handles, error))

    def on_change(self) -> None: ...

    def on_limits(self, facts: EngineFacts) -> None:
        self.limits.append(facts)

    def on_picked(self, reason: PickReason) -> None:
        self.picked.append(reason)

    def on_engine_lost(self, engine_id: str, error: StepwireError) -> None: ...

    def on_engine_refused(self, error: EngineRefusedError) -> None: ...

    def on_batch_gap(self, engine_id: str, num_missing: int) -> None: ...


class OpenSession:
    def __init__(self) -> None:
        self.outbox = Outbox()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def pool(listener: Listener, tmp_path: Path) -> EnginePool:
    store = TokenizerStore(tmp_path, None)
    pool = EnginePool(["a:1", "b:1"], ClientIdentity("c", "s", ""), store, listener, ready_timeout_s=1)
    for connection in pool.connections:
        make_ready(connection)
    return pool


def make_ready(connection: EngineConnection) -> None:
    connection.state, connection.engine_state = ConnectionState.READY, EngineState.RUNNING
    connection.facts = facts(connection.endpoint)
    connection._session = OpenSession()


def new(handle: int) -> NewRequest:
    def fill(message: pb.EngineCoreRequest, handle: int, now: float) -> None:
        message.handle = handle

    return NewRequest(handle, 100, fill, {"request_id": f"r{handle}"})


def submit(pool: EnginePool, handles: Sequence[int]) -> str:
    """The id of the engine that got the request."""
    pool.submit([new(handle) for handle in handles])
    return pool.engine_of(handles[0]).engine_id


def frames(connection: EngineConnection) -> list[pb.ConnectRequest]:
    return list(connection._session.outbox.take())


def added(connection: EngineConnection) -> list[int]:
    return [request.handle for frame in frames(connection) for request in frame.add.requests]


def finished(handle: int, reason: EngineFinishReason, error: StepwireError | None = None) -> EngineOutput:
    return EngineOutput(handle, finish=EngineFinish(reason, error=error))


def test_handles_are_never_drawn_twice(pool: EnginePool):
    drawn = [handle for _ in range(50) for handle in pool.draw_handles(3)]
    assert len(set(drawn)) == 150
    assert min(drawn) > 0


def test_choices_of_a_request_share_an_engine_and_requests_alternate(pool: EnginePool):
    ids = {submit(pool, pool.draw_handles(2)) for _ in range(2)}
    assert ids == {"a:1", "b:1"}
    assert sorted(len(added(connection)) for connection in pool.connections) == [2, 2]


def test_least_loaded_engine_wins(pool: EnginePool):
    first, second = pool.connections
    first.on_load(EngineLoad(running=5))
    second.on_load(EngineLoad(waiting=1))
    assert submit(pool, pool.draw_handles(1)) == "b:1"
    # The new one counts as waiting until the engine reports again: 4 + 4 against 5.
    assert submit(pool, pool.draw_handles(1)) == "a:1"


async def test_abort_goes_where_the_request_runs_and_keeps_the_route(pool: EnginePool, listener: Listener):
    (handle,) = pool.draw_handles(1)
    engine_id = submit(pool, [handle])
    owner = next(connection for connection in pool.connections if connection.engine_id == engine_id)
    pool.abort([handle, 999], AbortKind.DEADLINE)

    abort = frames(owner)[-1].abort
    assert (list(abort.handles), abort.reason) == ([handle], pb.ABORT_REASON_DEADLINE)
    assert pool.num_routes == 1
    await pool.on_outputs(owner, [finished(handle, EngineFinishReason.ABORTED)])
    assert pool.num_routes == 0
    assert [output.handle for output in listener.outputs] == [handle]


async def test_refused_request_is_tried_once_more_elsewhere(pool: EnginePool, listener: Listener):
    (handle,) = pool.draw_handles(1)
    submit(pool, [handle])
    first = next(connection for connection in pool.connections if frames(connection))
    second = next(connection for connection in pool.connections if connection is not first)
    refusal = finished(handle, EngineFinishReason.REJECTED, OverloadedError("full"))

    await pool.on_outputs(first, [refusal])
    assert listener.outputs == []
    assert added(second) == [handle]
    assert pool.engine_of(handle) == second.facts
    await pool.on_outputs(second, [refusal])
    assert listener.outputs == [refusal]
    assert pool.num_routes == 0


@pytest.mark.parametrize("case", ["other reason", "aborted", "nowhere else"])
async def test_refusals_that_are_told_at_once(pool: EnginePool, listener: Listener, case: str):
    (handle,) = pool.draw_handles(1)
    submit(pool, [handle])
    first = next(connection for connection in pool.connections if frames(connection))
    error: StepwireError = OverloadedError("full")
    if case == "other reason":
        error = RequestFailedError("too large", reason="KV_CAPACITY")
    elif case == "aborted":
        pool.abort([handle], AbortKind.CLIENT_CANCELLED)
    else:
        next(one for one in pool.connections if one is not first).engine_state = EngineState.STALLED
    await pool.on_outputs(first, [finished(handle, EngineFinishReason.REJECTED, error)])
    assert len(listener.outputs) == 1
    assert pool.num_routes == 0


async def test_a_report_counts_what_the_engine_has_answered_and_nothing_else(pool: EnginePool):
    first, second = pool.connections
    second.state = ConnectionState.CONNECTING
    handles = pool.draw_handles(3)
    for handle in handles:
        submit(pool, [handle])
    assert first.candidate.num_unreported == 3
    queued = [EngineOutput(handle, events=((EngineEvent.QUEUED, 1),)) for handle in handles[:2]]
    await pool.on_outputs(first, queued)
    assert first.candidate.num_unreported == 3
    first.on_load(EngineLoad(waiting=2))
    # The third was on its way when the engine reported.
    assert first.candidate.num_unreported == 1
    await pool.on_outputs(first, [finished(handles[2], EngineFinishReason.ABORTED), *queued])
    first.on_load(EngineLoad(running=2))
    assert first.candidate.num_unreported == 0


async def test_what_crossed_with_the_orderly_end_of_an_engine_goes_elsewhere(pool: EnginePool, listener: Listener):
    handles = pool.draw_handles(6)
    for handle in handles:
        submit(pool, [handle])
    leaving, staying = pool.connections
    its_own = added(leaving)
    await pool.on_outputs(leaving, [EngineOutput(its_own[0], events=((EngineEvent.QUEUED, 1),))])
    pool.abort([its_own[1]], AbortKind.CLIENT_CANCELLED)
    frames(staying)
    error = UnavailableError("the engine has shut down", reason="DRAINING")
    leaving.state = ConnectionState.LOST
    pool.on_lost(leaving, error)

    assert listener.failed == [(its_own[:2], error)]
    assert added(staying) == its_own[2:]
    assert pool.engine_of(its_own[2]) == staying.facts
    assert listener.picked == [PickReason.LOAD] * 6 + [PickReason.RETRY]


async def test_ends_that_a_lost_session_leaves_unprocessed_are_failed(pool: EnginePool, listener: Listener):
    handles = pool.draw_handles(4)
    engine_id = submit(pool, handles)
    owner = next(connection for connection in pool.connections if connection.engine_id == engine_id)
    listener.turns = asyncio.Queue()
    listener.turns.put_nowait(None)
    ends = [finished(handle, EngineFinishReason.LENGTH) for handle in handles[:3]]
    reader = asyncio.create_task(pool.on_outputs(owner, ends))
    await asyncio.sleep(0)
    assert listener.outputs == ends[:1]
    frames(owner)
    # The engine has ended them: there is nothing to abort.
    pool.abort(handles[:3], AbortKind.CLIENT_CANCELLED)
    assert frames(owner) == []
    # As the session does when its heartbeat fails.
    reader.cancel()
    await asyncio.wait({reader})
    error = EngineDeadError("it does not answer pings", kind="heartbeat")
    pool.on_lost(owner, error)
    assert [set(handles[1:]) <= set(failed) for failed, _ in listener.failed] == [True]
    assert pool.num_routes == 0


async def test_whoever_has_asked_is_told_where_its_request_moves(pool: EnginePool):
    (handle,) = pool.draw_handles(1)
    moves: list[EngineFacts] = []
    pool.submit([new(handle)._replace(on_move=moves.append)])
    first = next(connection for connection in pool.connections if frames(connection))
    second = next(connection for connection in pool.connections if connection is not first)
    assert moves == []
    # Refused here and ended there in one turn: nobody could look for it in between.
    await pool.on_outputs(first, [finished(handle, EngineFinishReason.REJECTED, OverloadedError("full"))])
    await pool.on_outputs(second, [finished(handle, EngineFinishReason.LENGTH)])
    assert pool.engine_of(handle) is None
    assert moves == [second.facts]


async def test_a_request_that_moves_while_its_refusal_is_processed_keeps_its_new_route(
    pool: EnginePool, listener: Listener
):
    moved, staying = pool.draw_handles(2)
    engine_id = submit(pool, [moved, staying])
    first = next(connection for connection in pool.connections if connection.engine_id == engine_id)
    second = next(connection for connection in pool.connections if connection is not first)
    refusal = finished(moved, EngineFinishReason.REJECTED, OverloadedError("full"))
    end = finished(staying, EngineFinishReason.LENGTH)
    await pool.on_outputs(first, [refusal, end])
    assert listener.outputs == [end]
    assert (pool.num_routes, pool.engine_of(moved)) == (1, second.facts)


def test_the_limits_are_those_of_the_engines_that_are_left(pool: EnginePool, listener: Listener):
    dead, left = pool.connections
    dead.facts = facts(dead.endpoint, max_model_len=60)
    error = EngineDeadError("gone")
    dead.state = ConnectionState.LOST
    pool.on_lost(dead, error)
    assert [limits.max_model_len for limits in listener.limits] == [100]
    # With none left nothing is known that would be better than the last ones.
    left.state = ConnectionState.LOST
    pool.on_lost(left, error)
    assert len(listener.limits) == 1


def test_a_paused_engine_gets_requests_only_when_none_runs(pool: EnginePool):
    paused, running = pool.connections
    paused.engine_state = EngineState.PAUSED
    running.on_load(EngineLoad(running=100, waiting=100))
    assert {submit(pool, pool.draw_handles(1)) for _ in range(4)} == {"b:1"}
    running.engine_state = EngineState.STALLED
    assert submit(pool, pool.draw_handles(1)) == "a:1"


def pin(pool: EnginePool, rank: int) -> str:
    (handle,) = pool.draw_handles(1)
    pool.submit([new(handle)], rank)
    return pool.engine_of(handle).engine_id


@pytest.fixture
def ranks(pool: EnginePool) -> EnginePool:
    for rank, connection in enumerate(pool.connections):
        connection.facts = facts(connection.endpoint, data_parallel_rank=rank, data_parallel_size=3)
    return pool


def test_a_pinned_request_goes_to_its_rank_whatever_the_load(ranks: EnginePool, listener: Listener):
    ranks.connections[1].on_load(EngineLoad(waiting=100))
    assert [pin(ranks, 1), pin(ranks, 0), pin(ranks, 1)] == ["b:1", "a:1", "b:1"]
    assert listener.picked == [PickReason.PINNED] * 3


def test_a_rank_that_nobody_has_or_that_is_away(ranks: EnginePool):
    with pytest.raises(InvalidRequestError, match="x-data-parallel-rank: 3"):
        pin(ranks, 3)
    with pytest.raises(UnavailableError, match="no engine of rank 2"):
        pin(ranks, 2)
    ranks.connections[1].engine_state = EngineState.STALLED
    with pytest.raises(UnavailableError, match="b:1 is STALLED"):
        pin(ranks, 1)
    assert pin(ranks, 0) == "a:1"
    ranks.connections[0].engine_state = EngineState.PAUSED
    assert pin(ranks, 0) == "a:1"
    assert ranks.num_routes == 2


async def test_a_pinned_request_is_tried_nowhere_else(ranks: EnginePool, listener: Listener):
    (handle,) = ranks.draw_handles(1)
    ranks.submit([new(handle)], 0)
    refusal = finished(handle, EngineFinishReason.REJECTED, OverloadedError("full"))
    await ranks.on_outputs(ranks.connections[0], [refusal])
    assert listener.outputs == [refusal]


def test_loss_of_an_engine_fails_its_requests_only(pool: EnginePool, listener: Listener):
    handles = pool.draw_handles(4)
    owners = {handle: submit(pool, [handle]) for handle in handles}
    lost = pool.connections[0]
    error = EngineDeadError("gone")
    pool.on_lost(lost, error)
    expected = [handle for handle in handles if owners[handle] == lost.engine_id]
    assert listener.failed == [(expected, error)]
    assert pool.num_routes == len(handles) - len(expected)


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (["never", "never"], "ENGINE_STARTING"),
        (["dead", "dead"], "ENGINE_DEAD"),
        (["dead", "never"], "ENGINE_STARTING"),
        (["dead", "draining"], "DRAINING"),
        (["draining", "stalled"], "ENGINE_STARTING"),
    ],
)
def test_the_reason_is_that_of_the_engine_that_is_back_soonest(pool: EnginePool, states: list[str], reason: str):
    for connection, state in zip(pool.connections, states, strict=True):
        if state == "never":
            connection.facts, connection.state = None, ConnectionState.CONNECTING
        elif state == "dead":
            connection.last_error, connection.state = EngineDeadError("boom"), ConnectionState.LOST
            connection.engine_state = EngineState.DEAD
        elif state == "draining":
            connection.state, connection.engine_state = ConnectionState.DRAINING, EngineState.DRAINING
        else:
            connection.engine_state = EngineState.STALLED
    assert not pool.is_available
    with pytest.raises(UnavailableError) as caught:
        submit(pool, pool.draw_handles(1))
    assert caught.value.reason == reason
    assert caught.value.retry_after_ms > 0
    assert pool.num_routes == 0


async def test_engines_must_agree(pool: EnginePool, listener: Listener, tmp_path: Path):
    newcomer = pool.connections[1]
    for change, reason in (
        ({"model": "x"}, "MODEL_MISMATCH"),
        ({"revision": "x"}, "MODEL_MISMATCH"),
        ({"tokenizer_sha256": "x"}, "TOKENIZER_MISMATCH"),
        ({"weight_version": "2"}, "WEIGHTS_MISMATCH"),
    ):
        with pytest.raises(EngineRefusedError, match="must agree") as caught:
            await pool.on_attach(newcomer, facts("b", **change), tmp_path)
        assert caught.value.reason == reason
        assert reason in REFUSAL_REASONS
    await pool.on_attach(newcomer, facts("b", max_model_len=60, kv_cache_tokens=5000), tmp_path)
    assert (listener.attached[0].max_model_len, listener.attached[0].kv_cache_tokens) == (60, 1000)


async def test_a_draining_engine_counts_as_long_as_it_runs_requests(
    pool: EnginePool, listener: Listener, tmp_path: Path
):
    draining, newcomer = pool.connections
    newcomer.state = ConnectionState.CONNECTING
    (handle,) = pool.draw_handles(1)
    submit(pool, [handle])
    draining.state, draining.engine_state = ConnectionState.DRAINING, EngineState.DRAINING
    other = facts("b", model="x", max_model_len=200)
    with pytest.raises(EngineRefusedError, match="must agree"):
        await pool.on_attach(newcomer, other, tmp_path)
    assert listener.attached == []

    await pool.on_outputs(draining, [finished(handle, EngineFinishReason.LENGTH)])
    await pool.on_attach(newcomer, other, tmp_path)
    # Limits of an engine that takes no requests restrict nobody.
    assert listener.attached == [other]


def test_an_engine_is_attached_once_whatever_its_addresses(pool: EnginePool):
    first, second = pool.connections
    found = facts("same")
    pool.on_found(first, found)
    first.boot = found.boot
    pool.on_found(first, found)
    with pytest.raises(EngineRefusedError, match="attached at a:1 already"):
        pool.on_found(second, found)
    # The id is what operators, metrics and answers name it by, so that two may not share it.
    with pytest.raises(EngineRefusedError, match="both call themselves same"):
        pool.on_found(second, facts("same", boot_id="another one"))
    first.boot = None
    pool.on_found(second, facts("same", boot_id="another life"))


def test_fingerprint_is_that_of_what_decides_the_numbers():
    same = facts("a"), facts("b", boot_id="c", max_model_len=5)
    assert len({one.fingerprint for one in same}) == 1
    for change in ({"dtype": "bfloat16"}, {"version": "2"}, {"model": "x"}, {"weight_version": "2"}, {"revision": "x"}):
        assert facts("a", **change).fingerprint != same[0].fingerprint


def test_a_kind_of_constraint_is_offered_only_when_every_engine_has_it():
    first = facts("a", structured_output_kinds=("regex", "choice"))
    second = facts("b", structured_output_kinds=("choice", "grammar"))
    assert strictest(first, [second]).structured_output_kinds == ("choice",)
    assert strictest(first, []).structured_output_kinds == ("regex", "choice")


def test_priorities_are_offered_only_when_every_engine_has_them():
    first, second = facts("a", has_priorities=True), facts("b")
    assert not strictest(first, [second]).has_priorities
    assert not strictest(second, [first]).has_priorities
    assert strictest(first, [facts("c", has_priorities=True)]).has_priorities


def test_strictest_of_one_is_itself():
    assert strictest(facts("a"), []) == facts("a")
