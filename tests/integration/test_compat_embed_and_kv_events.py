"""vllm.grpc.engine.VllmEngine: vectors, and the feed of cache events relayed from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from fakes.fake_engine import WAIT_S, FakeEngine
from fakes.fake_pooling import HIDDEN_SIZE, wire_vector
from frontend.api.compat.kv_events_messages import KvBatches
from frontend.engine_client.kv_events import AllCleared, BlocksRemoved, BlocksStored, KvChanges
from running_frontend import SERVING, RunningFrontend, failure_of, running_frontend
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as engine_pb
from stepwire.errors import StepwireError

Code = grpc.StatusCode
HASHES = [bytes([number]) * 32 for number in range(1, 5)]
SHORT = [int.from_bytes(one[:8], "big", signed=True) for one in HASHES]
CLEARED = engine_pb.KvEvent(cleared=engine_pb.KvEvent.AllBlocksCleared())


@pytest.fixture
async def frontend(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[RunningFrontend]:
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", relay_kv_events=True) as running:
        await running.wait_for_health(SERVING)
        yield running


@pytest.fixture
def gateway(frontend: RunningFrontend) -> pb_grpc.VllmEngineStub:
    return pb_grpc.VllmEngineStub(frontend.channel)


async def test_embed_gives_the_vector_of_the_ids(gateway, engine: FakeEngine):
    response = await gateway.Embed(pb.EmbedRequest(request_id="mine", tokenized=pb.TokenizedInput(input_ids=[5, 6, 7])))
    vector = np.frombuffer(wire_vector([5, 6, 7], engine_pb.PoolingParams(task="embed")), "<f4")
    assert list(response.embedding) == vector.tolist()
    assert (response.prompt_tokens, response.embedding_dim) == (3, HIDDEN_SIZE)
    assert [add.request_id for add in engine.adds] == ["mine"]


async def test_embed_without_ids_is_refused_by_name(gateway):
    failures = [
        await failure_of(gateway.Embed(request))
        for request in (pb.EmbedRequest(), pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[400])))
    ]
    assert {failure.code for failure in failures} == {Code.INVALID_ARGUMENT}
    assert [failure.fields for failure in failures] == [["tokenized"], ["inputs[0].token_ids.ids[0]"]]


async def test_an_abort_ends_an_embed(gateway, engine: FakeEngine):
    engine.may_step.clear()
    call = gateway.Embed(pb.EmbedRequest(request_id="mine", tokenized=pb.TokenizedInput(input_ids=[5])))
    failed = asyncio.ensure_future(failure_of(call))
    await engine.wait_until(lambda: engine.num_live == 1)
    await gateway.Abort(pb.AbortRequest(request_ids=["mine"]))
    assert (await failed).code is Code.CANCELLED


def subscribe(gateway: pb_grpc.VllmEngineStub, start: int = 0):
    return gateway.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=start))


def stored(*places: int, salted: bool = False, parent: bytes = b"") -> engine_pb.KvEvent:
    tokens = [] if salted else [10 * place + index for place in places for index in range(2)]
    return engine_pb.KvEvent(
        stored=engine_pb.KvEvent.BlockStored(
            block_hashes=[HASHES[place] for place in places],
            parent_block_hash=parent,
            token_ids=token_array.pack(tokens),
            block_size=2,
            salted=salted,
        )
    )


def response(sequence: int, *events: engine_pb.KvEvent) -> engine_pb.SubscribeKvEventsResponse:
    return engine_pb.SubscribeKvEventsResponse(sequence=sequence, data_parallel_rank=3, events=events)


async def test_without_a_feed_it_is_unimplemented_and_names_the_flag(gateway):
    failure = await failure_of(subscribe(gateway).read())
    assert (failure.code, failure.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE")
    assert "--enable-kv-events" in failure.message


async def test_nothing_is_relayed_unless_the_operator_wants_it(engine: FakeEngine, tmp_path):
    engine.kv_feed.is_on = True
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache") as running:
        await running.wait_for_health(SERVING)
        failure = await failure_of(subscribe(pb_grpc.VllmEngineStub(running.channel)).read())
        assert (failure.code, failure.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE")
        assert "--relay-kv-events" in failure.message
    assert engine.kv_feed.starts == []


async def test_headers_come_before_there_is_anything_to_tell(gateway, engine: FakeEngine):
    engine.kv_feed.is_on = True
    call = subscribe(gateway, 77)
    async with asyncio.timeout(WAIT_S):
        await call.initial_metadata()
        await engine.kv_feed.has_begun.wait()
    assert engine.kv_feed.starts == [77]
    call.cancel()
    # The engine gets its thread back.
    async with asyncio.timeout(WAIT_S):
        await engine.kv_feed.is_over.wait()


async def test_a_snapshot_and_what_follows_reach_the_gateway(gateway, engine: FakeEngine):
    engine.kv_feed.is_on = True
    for one in (
        response(0, CLEARED, stored(0, 1)),
        response(500, stored(2, parent=HASHES[1])),
        response(501, stored(3, salted=True)),
        response(502, engine_pb.KvEvent(removed=engine_pb.KvEvent.BlockRemoved(block_hashes=HASHES[2:]))),
        response(503, CLEARED),
    ):
        engine.kv_feed.responses.put_nowait(one)
    call = subscribe(gateway)
    batches = [await call.read() for _ in range(5)]
    assert [batch.sequence_number for batch in batches] == [499, 500, 501, 502, 503]
    assert {batch.dp_rank for batch in batches} == {3}
    snapshots = [batch.snapshot for batch in batches if batch.HasField("snapshot")]
    assert [(one.index, one.count, one.blocks) for one in snapshots] == [(0, 2, 3), (1, 2, 3)]
    assert [event.WhichOneof("data") for event in batches[0].events] == ["cleared", "stored"]
    first = batches[0].events[1].stored
    assert [(block.block_hash, list(block.token_ids), block.block_size) for block in first.blocks] == [
        (SHORT[0], [0, 1], 2),
        (SHORT[1], [10, 11], 2),
    ]
    assert not first.HasField("parent_block_hash")
    assert batches[1].events[0].stored.parent_block_hash == SHORT[1]
    # Nobody may learn of a tenant's tokens; the number still counts.
    assert list(batches[2].events) == []
    assert list(batches[3].events[0].removed.block_hashes) == SHORT[2:]
    assert batches[4].events[0].HasField("cleared")


async def test_many_tokens_arrive_whole_by_way_of_a_thread(gateway, engine: FakeEngine):
    engine.kv_feed.is_on = True
    tokens = list(range(20_000))
    block = engine_pb.KvEvent.BlockStored(
        block_hashes=HASHES[:2], token_ids=token_array.pack(tokens), block_size=len(tokens) // 2
    )
    engine.kv_feed.responses.put_nowait(response(7, engine_pb.KvEvent(stored=block)))
    batch = await subscribe(gateway, 7).read()
    assert [token for block in batch.events[0].stored.blocks for token in block.token_ids] == tokens


@pytest.mark.parametrize(
    ("last", "code"),
    [
        (None, Code.UNAVAILABLE),
        (StepwireError("too slow", reason="SLOW_CLIENT"), Code.RESOURCE_EXHAUSTED),
        (StepwireError("it died", reason="ENGINE_DEAD"), Code.UNAVAILABLE),
    ],
)
async def test_the_end_of_the_feed_is_an_error_that_says_why(gateway, engine: FakeEngine, last, code):
    engine.kv_feed.is_on = True
    engine.kv_feed.responses.put_nowait(response(7, stored(0)))
    engine.kv_feed.responses.put_nowait(last)
    call = subscribe(gateway, 7)
    assert (await call.read()).sequence_number == 7
    assert (await failure_of(call.read())).code is code


async def test_the_end_of_the_frontend_ends_the_relay(engine: FakeEngine, tmp_path):
    engine.kv_feed.is_on = True
    settings = {"relay_kv_events": True}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", **settings) as running:
        await running.wait_for_health(SERVING)
        call = subscribe(pb_grpc.VllmEngineStub(running.channel))
        await call.initial_metadata()
        running.process.request_stop(at_once=True)
        assert (await failure_of(call.read())).code is Code.UNAVAILABLE
        async with asyncio.timeout(WAIT_S):
            await engine.kv_feed.is_over.wait()


async def test_feeds_of_several_engines_are_not_mixed(tokenizer_dir, tmp_path):
    one, two = (FakeEngine(tokenizer_dir, vocab_size=400, engine_id=f"fake-{number}") for number in range(2))
    async with (
        one.running(),
        two.running(),
        running_frontend(one.endpoint, two.endpoint, cache_dir=tmp_path / "cache", relay_kv_events=True) as running,
    ):
        await running.wait_until(lambda: sum(c.is_available for c in running.process.frontend.pool.connections) == 2)
        failure = await failure_of(subscribe(pb_grpc.VllmEngineStub(running.channel)).read())
        assert (failure.code, failure.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE")
        assert "2 engines" in failure.message


def test_a_snapshot_of_one_part_is_one_and_a_later_reset_is_none() -> None:
    batches = KvBatches()
    chain = BlocksStored((HASHES[0],), b"", [1, 2], 2, 0, is_salted=False)
    [snapshot] = batches.take(KvChanges(9, 0, [AllCleared(), chain]))
    assert (snapshot.sequence_number, snapshot.snapshot.count, snapshot.snapshot.blocks) == (9, 1, 1)
    for number, change in ((10, AllCleared()), (11, BlocksRemoved((HASHES[0],), 0))):
        [batch] = batches.take(KvChanges(number, 0, [change]))
        assert (batch.sequence_number, batch.HasField("snapshot")) == (number, False)


def test_who_goes_on_where_it_was_gets_no_snapshot() -> None:
    [batch] = KvBatches().take(KvChanges(9, 0, [BlocksRemoved((HASHES[0],), 0)]))
    assert not batch.HasField("snapshot")
