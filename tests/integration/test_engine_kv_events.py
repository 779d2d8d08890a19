"""The feed of cache events of a real engine process: a reader that sees nothing else knows what the cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest

from engine_core.kv_cache.block_hash import BlockHasher
from fakes.fake_executor import POISON_TOKEN, next_token
from fakes.kv_event_listener import Content, KVEventListener
from running_engine import TIMEOUT_S, EngineStream, RunningEngine, engine_request, running_engine
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc

SIZE = 4
FLAGS = ("--enable-kv-events", "--block-size", str(SIZE), "--num-blocks", "13", "--max-model-len", "-1")
RESET = pb.UtilityCall(call_id=9, reset_prefix_cache={})  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[RunningEngine]:
    with running_engine(*FLAGS) as engine:
        yield engine


class Subscriber:
    """A client of the feed that keeps its own map."""

    def __init__(self, engine: RunningEngine, start_sequence: int = 0) -> None:
        stub = engine_core_pb2_grpc.KvEventsServiceStub(engine.channel)
        request = pb.SubscribeKvEventsRequest(start_sequence=start_sequence)
        self.call = stub.SubscribeKvEvents(request, timeout=TIMEOUT_S, wait_for_ready=True)
        self.listener = KVEventListener()
        self.responses: list[pb.SubscribeKvEventsResponse] = []

    @property
    def contents(self) -> dict[tuple[int, bytes], Content]:
        return self.listener.contents

    def next(self) -> pb.SubscribeKvEventsResponse:
        response = next(self.call)
        self.listener.read(response)
        self.responses.append(response)
        return response

    def until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.next()

    def kinds(self) -> set[str | None]:
        return {event.WhichOneof("event") for response in self.responses for event in response.events}


def sequence_of(prompt: list[int], max_tokens: int) -> list[int]:
    """Prompt and answer of the fake model, without the last token, which is never computed."""
    known = list(prompt)
    for _ in range(max_tokens):
        known.append(next_token(known))
    return known[:-1]


def contents_of(token_ids: list[int], salt: str = "") -> dict[tuple[int, bytes], Content]:
    """The full blocks of a sequence as an engine with default settings stores them, for its only group of layers."""
    hashes: list[bytes] = []
    BlockHasher(SIZE, "stepwire").extend(hashes, len(token_ids), lambda start, end: token_ids[start:end], salt)
    parents = [None, *hashes]
    return {
        (0, block_hash): (parents[i], [] if salt else token_ids[i * SIZE : (i + 1) * SIZE], bool(salt))
        for i, block_hash in enumerate(hashes)
    }


def serve(stream: EngineStream, handle: int, prompt: list[int], max_tokens: int, **fields: object) -> pb.PrefillStats:
    """Run one request to its end; where its prompt came from."""
    stream.add(engine_request(handle, prompt, max_tokens, **fields))
    stream.until_finished(handle)
    [prefill] = [
        output.prefill
        for frame in stream.frames
        for output in frame.outputs.outputs
        if output.handle == handle and output.HasField("prefill")
    ]
    return prefill


def num_cached(stream: EngineStream) -> int:
    """As the loop itself counts, between two steps."""
    return stream.dump_state().dump_state.kv_blocks_cached


def test_stored_hit_removed_cleared(engine: RunningEngine) -> None:
    subscriber, stream = Subscriber(engine), engine.connect()
    snapshot = subscriber.next()
    assert [event.WhichOneof("event") for event in snapshot.events] == ["cleared"]

    # Stored: two blocks of the prompt, one that the answer fills, and the blocks of a tenant.
    first = list(range(10, 19))
    expected = contents_of(sequence_of(first, 5))
    assert len(expected) == 3
    assert serve(stream, 1, first, 5).local_cached_tokens == 0
    subscriber.until(lambda: subscriber.contents == expected)
    expected |= contents_of(sequence_of(first, 1), salt="a secret")
    serve(stream, 2, first, 1, cache_salt="a secret")
    subscriber.until(lambda: subscriber.contents == expected)
    assert b"a secret" not in b"".join(response.SerializeToString() for response in subscriber.responses)

    # Hit: what the reader knows is what the engine finds, and it is no news.
    num_responses = len(subscriber.responses)
    assert serve(stream, 3, [*first, 77], 1).local_cached_tokens == 2 * SIZE
    assert num_cached(stream) == len(expected) == 5

    # Removed: 12 blocks hold data, and this one needs 11 of them.
    long = list(range(100, 141))
    serve(stream, 4, long, 1)
    subscriber.until(lambda: contents_of(long).keys() <= subscriber.contents.keys())
    assert len(subscriber.responses) == num_responses + 1
    assert subscriber.responses[-1].events[0].WhichOneof("event") == "removed"
    assert num_cached(stream) == len(subscriber.contents)
    everything = expected | contents_of(long)
    assert subscriber.contents == {found: everything[found] for found in subscriber.contents}

    # A newcomer's snapshot is the same, and so is what the engine itself finds.
    late = Subscriber(engine)
    late.next()
    assert late.contents == subscriber.contents
    num_hit = serve(stream, 5, [*long, 7, 7], 1).local_cached_tokens
    assert num_hit == SIZE * len(contents_of(long).keys() & subscriber.contents.keys()) == 40

    # Cleared.
    stream.send(utility=RESET)
    assert stream.until(lambda frame: frame.HasField("utility_result")).utility_result.reset_prefix_cache.reset
    for reader in (subscriber, late):
        reader.until(lambda reader=reader: not reader.contents)
        assert reader.kinds() >= {"cleared"}
    assert num_cached(stream) == 0
    sequences = [response.sequence for response in subscriber.responses]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


def test_who_comes_back_has_missed_nothing_and_a_new_engine_is_a_gap(engine: RunningEngine) -> None:
    subscriber, stream = Subscriber(engine), engine.connect()
    last = subscriber.next().sequence
    subscriber.call.cancel()
    serve(stream, 1, list(range(10, 19)), 1)
    serve(stream, 2, list(range(30, 39)), 1)
    back = Subscriber(engine, last + 1)
    expected = contents_of(list(range(10, 19))) | contents_of(list(range(30, 39)))
    back.until(lambda: back.contents == expected)
    assert [response.sequence for response in back.responses] == [last + 1, last + 2]
    assert back.kinds() == {"stored"}
    with running_engine(*FLAGS) as other:
        moved = Subscriber(other, last + 3)
        response = moved.next()
        assert response.events[0].WhichOneof("event") == "cleared"
        assert response.sequence > last + 3


def test_a_subscriber_hears_of_the_engines_death(engine: RunningEngine) -> None:
    subscriber, stream = Subscriber(engine), engine.connect()
    subscriber.next()
    stream.add(engine_request(1, [POISON_TOKEN] * 3))
    with pytest.raises(grpc.RpcError):
        subscriber.next()
    assert subscriber.call.code() is grpc.StatusCode.UNAVAILABLE
    assert "the engine died" in subscriber.call.details()
    assert engine.wait() == 1


def test_a_drained_engine_ends_the_feed_with_ok(engine: RunningEngine) -> None:
    subscriber = Subscriber(engine)
    subscriber.next()
    engine.terminate()
    with pytest.raises(StopIteration):
        subscriber.next()
    assert subscriber.call.code() is grpc.StatusCode.OK
    assert engine.wait() == 0


def test_subscribing_does_not_wait_for_the_model() -> None:
    with running_engine(*FLAGS, "--fake-load-s", "3600") as engine:
        subscriber = Subscriber(engine)
        assert subscriber.call.initial_metadata() is not None
        subscriber.next()
        engine.terminate()
        engine.wait()


def test_residency_is_measured_on_demand() -> None:
    flags = ("--kv-cache-metrics", "--kv-cache-metrics-sample", "1", *FLAGS[1:])
    with running_engine(*flags) as engine:
        stream = engine.connect()
        names = [f"kv_block_{name}_seconds_count{{.*}}" for name in ("lifetime", "idle_before_evict", "reuse_gap")]
        serve(stream, 1, list(range(10, 19)), 1)
        assert [engine.metric(name) for name in names] == [0, 0, 0]
        serve(stream, 2, list(range(10, 20)), 1)
        assert [engine.metric(name) for name in names] == [0, 0, 2]
        serve(stream, 3, list(range(100, 145)), 1)
        assert [engine.metric(name) for name in names] == [2, 2, 2]
        assert engine.metric(r'kv_block_lifetime_seconds_bucket{.*le="\+Inf".*}') == 2


def test_what_costs_the_loop_is_off_by_default(engine: RunningEngine) -> None:
    for name in ("kv_block_lifetime_seconds_count", "corrupted_requests_total", "estimated_flops_total"):
        with pytest.raises(AssertionError, match="no series"):
            engine.metric(rf"{name}\{{.*\}}")
    assert engine.metric(r"prefix_cache_preempted_query_tokens_total\{.*\}") == 0
    assert engine.metric(r"prefix_cache_preempted_hit_tokens_total\{.*\}") == 0
