"""KvEventsService over a real socket, around a feed without an engine: messages, statuses, slow readers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from engine_core.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from engine_core.kv_event_feed import KVEventFeed, KVSnapshot
from engine_core.kv_events_server import KvEventsServicer, encode, snapshot_part_events
from fakes.kv_event_listener import KVEventListener
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc
from stepwire.errors import EngineDeadError

BASE = 7
SIZE = 2
RANK = 3
TIMEOUT_S = 30.0


class Served:
    """A feed that is served, and a client of it."""

    def __init__(self, feed: KVEventFeed | None, num_threads: int = 4) -> None:
        self.server = grpc.server(ThreadPoolExecutor(num_threads))
        engine_core_pb2_grpc.add_KvEventsServiceServicer_to_server(KvEventsServicer(feed, SIZE, RANK), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.stub = engine_core_pb2_grpc.KvEventsServiceStub(self.channel)

    def subscribe(self, start_sequence: int = 0):
        return self.stub.SubscribeKvEvents(
            pb.SubscribeKvEventsRequest(start_sequence=start_sequence), timeout=TIMEOUT_S
        )

    def close(self) -> None:
        self.channel.close()
        self.server.stop(0).wait()


@pytest.fixture
def feed() -> Iterator[KVEventFeed]:
    feed = KVEventFeed(BASE, 1000, lambda: 0.0)
    yield feed
    feed.close()


@pytest.fixture
def served(feed: KVEventFeed) -> Iterator[Served]:
    served = Served(feed)
    yield served
    feed.close()
    served.close()


def block(name: str, parent: str | None, *, is_salted: bool = False, group: int = 0) -> BlockStored:
    return BlockStored(name.encode(), parent.encode() if parent else None, [ord(name), 9], is_salted, group)


def reason_of(call: grpc.Call) -> str:
    info = error_details_pb2.ErrorInfo()
    assert rpc_status.from_call(call).details[0].Unpack(info)
    return info.reason


def rest(call) -> tuple[list[pb.SubscribeKvEventsResponse], grpc.StatusCode]:
    read: list[pb.SubscribeKvEventsResponse] = []
    with contextlib.suppress(grpc.RpcError):
        read += call
    return read, call.code()


def test_headers_come_before_anything_happens(served: Served, feed: KVEventFeed) -> None:
    call = served.subscribe(BASE + 1)
    assert call.initial_metadata() is not None
    feed.publish([block("x", None)])
    assert next(call).sequence == BASE + 1


def test_an_engine_without_a_feed_names_the_flag() -> None:
    served = Served(None)
    call = served.subscribe()
    assert rest(call) == ([], grpc.StatusCode.UNIMPLEMENTED)
    assert "--enable-kv-events" in call.details()
    assert reason_of(call) == "UNSUPPORTED_FEATURE"
    served.close()


def test_chains_are_joined_and_order_is_kept(served: Served, feed: KVEventFeed) -> None:
    call = served.subscribe(BASE + 1)
    feed.publish([block("a", None), block("b", "a"), block("c", "a")])
    feed.publish([BlockRemoved(b"b"), BlockRemoved(b"c"), block("b", "a"), AllBlocksCleared(), block("d", None)])
    first, second = next(call), next(call)
    assert (first.data_parallel_rank, second.data_parallel_rank) == (RANK, RANK)
    assert [event.WhichOneof("event") for event in first.events] == ["stored", "stored"]
    chain = first.events[0].stored
    assert list(chain.block_hashes) == [b"a", b"b"]
    assert (chain.parent_block_hash, chain.block_size, chain.group, chain.salted) == (b"", SIZE, 0, False)
    assert token_array.unpack(chain.token_ids) == [ord("a"), 9, ord("b"), 9]
    assert first.events[1].stored.parent_block_hash == b"a"
    kinds = [event.WhichOneof("event") for event in second.events]
    assert kinds == ["removed", "stored", "cleared", "stored"]
    assert list(second.events[0].removed.block_hashes) == [b"b", b"c"]


def test_a_salted_chain_has_hashes_and_no_tokens(served: Served, feed: KVEventFeed) -> None:
    """Tokens and hash of a first block would let a reader try out salts."""
    call = served.subscribe(BASE + 1)
    feed.publish([block("a", None, is_salted=True), block("b", "a", is_salted=True), block("c", None)])
    salted, plain = next(call).events
    assert (salted.stored.salted, list(salted.stored.block_hashes), salted.stored.token_ids) == (
        True,
        [b"a", b"b"],
        b"",
    )
    assert (plain.stored.salted, token_array.unpack(plain.stored.token_ids)) == (False, [ord("c"), 9])


def test_a_snapshot_begins_empty_and_puts_parents_first(served: Served, feed: KVEventFeed) -> None:
    feed.publish([block("a", None), block("b", "a"), block("c", "b"), block("d", "a")])
    feed.publish([BlockRemoved(b"a"), block("e", None), block("a", None)])
    snapshot = next(served.subscribe())
    assert snapshot.sequence == BASE + 2
    assert snapshot.events[0].WhichOneof("event") == "cleared"
    hashes = [block_hash for event in snapshot.events[1:] for block_hash in event.stored.block_hashes]
    assert hashes == [b"a", b"b", b"c", b"d", b"e"]


def test_a_child_without_its_parent_is_in_the_snapshot(served: Served, feed: KVEventFeed) -> None:
    feed.publish([block("a", None), block("b", "a"), BlockRemoved(b"a")])
    listener = KVEventListener()
    listener.read(next(served.subscribe()))
    assert listener.contents == {(0, b"b"): (b"a", [ord("b"), 9], False)}


def test_groups_of_layers_have_chains_of_their_own(served: Served, feed: KVEventFeed) -> None:
    """The same hash stands for other content in each group: one may go while the other stays."""
    groups = [[block("a", None, group=group), block("b", "a", group=group)] for group in range(2)]
    call = served.subscribe(BASE + 1)
    feed.publish([*groups[0], *groups[1], BlockRemoved(b"a", 0), BlockRemoved(b"a", 1), BlockRemoved(b"b", 1)])
    events = next(call).events
    assert [(event.stored.group, list(event.stored.block_hashes)) for event in events[:2]] == [
        (0, [b"a", b"b"]),
        (1, [b"a", b"b"]),
    ]
    assert [(event.removed.group, list(event.removed.block_hashes)) for event in events[2:]] == [
        (0, [b"a"]),
        (1, [b"a", b"b"]),
    ]
    listener = KVEventListener()
    listener.read(next(served.subscribe()))
    assert listener.contents == {(0, b"b"): (b"a", [ord("b"), 9], False)}


PART = snapshot_part_events(SIZE)


@pytest.mark.parametrize("num_blocks", [0, PART - 1, PART, 3 * PART])
def test_only_the_last_part_of_a_snapshot_has_its_number(num_blocks: int) -> None:
    stored = [BlockStored(b"%d" % index, None, [1, 2], is_salted=False) for index in range(num_blocks)]
    parts = list(encode(KVSnapshot(BASE, stored), SIZE))
    assert [part.sequence for part in parts] == [0] * (num_blocks // PART) + [BASE]
    listener = KVEventListener()
    for part in parts:
        listener.read(part)
    assert len(listener.contents) == num_blocks


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("is_chain", [True, False])
def test_parts_of_a_snapshot_stay_well_below_what_clients_accept_by_default(block_size: int, is_chain: bool) -> None:
    hashes = [index.to_bytes(32, "big") for index in range(2 * snapshot_part_events(block_size))]
    parents = [None, *hashes] if is_chain else [bytes([255] * 32)] * len(hashes)
    stored = [
        BlockStored(block_hash, parent, [2**32 - 1] * block_size, is_salted=False)
        for block_hash, parent in zip(hashes, parents, strict=False)
    ]
    sizes = [part.ByteSize() for part in encode(KVSnapshot(2**63, stored), block_size)]
    assert len(sizes) == 3
    assert max(sizes) <= 2 * 2**20


def test_a_reader_that_is_too_slow_is_cut_with_the_reason() -> None:
    """It gets what was on its way and then the status, not silence; the publisher never waits."""
    feed = KVEventFeed(BASE, 1, lambda: 0.0)
    served = Served(feed)
    call = served.subscribe()
    assert next(call).sequence == BASE
    tokens = list(range(100_000))
    for index in range(200):
        feed.publish([BlockStored(b"%d" % index, None, tokens, is_salted=False)])
    read, code = rest(call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(call) == "SLOW_CLIENT"
    assert [response.sequence for response in read] == list(range(BASE + 1, BASE + 1 + len(read)))
    assert len(read) < 200
    feed.close()
    served.close()


class EncodedTokens(list[int]):
    """Tells when it is being encoded."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(range(num_tokens))
        self.is_reached = threading.Event()

    def __iter__(self) -> Iterator[int]:
        self.is_reached.set()
        return super().__iter__()


def test_a_reader_that_hangs_is_cancelled_to_free_its_thread() -> None:
    now = 0.0
    feed = KVEventFeed(BASE, 1, lambda: now)
    served = Served(feed, num_threads=1)
    call = served.subscribe()
    assert next(call).sequence == BASE
    # More than any window: the write ends when the client reads, which it does not.
    tokens = EncodedTokens(4_000_000)
    feed.publish([BlockStored(b"a", None, tokens, is_salted=False)])
    assert tokens.is_reached.wait(TIMEOUT_S)
    for name in (b"b", b"c"):
        feed.publish([BlockStored(name, None, [], is_salted=False)])
    now = 1000.0
    feed.cut_hung()
    assert rest(call) == ([], grpc.StatusCode.CANCELLED)
    # By the only thread.
    assert next(served.subscribe(BASE + 3)).sequence == BASE + 3
    feed.close()
    served.close()


def test_a_client_that_leaves_gives_its_place_back(served: Served, feed: KVEventFeed) -> None:
    calls = [served.subscribe() for _ in range(3)]
    for call in calls:
        next(call)
        call.cancel()
    # The server has four threads: with one still held by each of the three these would not all be served.
    for call in [served.subscribe() for _ in range(3)]:
        assert next(call).sequence == BASE


def test_the_end_of_the_engine_is_the_status(served: Served, feed: KVEventFeed) -> None:
    call = served.subscribe()
    next(call)
    feed.close(EngineDeadError("the engine died: because", cause="STEP_FAILED"))
    assert rest(call)[1] is grpc.StatusCode.UNAVAILABLE
    assert reason_of(call) == "ENGINE_DEAD"


def test_an_orderly_end_is_ok(served: Served, feed: KVEventFeed) -> None:
    call = served.subscribe()
    next(call)
    feed.close()
    assert rest(call) == ([], grpc.StatusCode.OK)
