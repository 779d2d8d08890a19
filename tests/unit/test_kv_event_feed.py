"""The feed of cache events: replay, gaps, snapshots, slow subscribers, the end."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from engine_core.kv_event_feed import MAX_HANG_S, MAX_SUBSCRIBERS, KVEventBatch, KVEventFeed, KVSnapshot, Subscription
from fakes.kv_event_listener import KVEventListener
from stepwire.errors import EngineDeadError, OverloadedError, StepwireError

BASE = 1000


class World:
    """A feed and the time."""

    def __init__(self, max_events: int = 100) -> None:
        self.now = 0.0
        self.feed = KVEventFeed(BASE, max_events, lambda: self.now)
        self.cancel = Mock()

    def store(self, *names: str) -> None:
        self.feed.publish([stored(name) for name in names])

    def subscribe(self, start_sequence: int) -> Subscription:
        return self.feed.subscribe(start_sequence, self.cancel)


@pytest.fixture
def world() -> World:
    return World()


def stored(name: str) -> BlockStored:
    return BlockStored(name.encode(), None, [1], is_salted=False)


def names(snapshot: KVEventBatch | KVSnapshot | None) -> list[str]:
    assert isinstance(snapshot, KVSnapshot)
    return [block.block_hash.decode() for block in snapshot.stored]


def test_zero_is_a_snapshot_and_then_every_batch(world: World) -> None:
    world.store("a", "b")
    world.feed.publish([BlockRemoved(b"a")])
    subscription = world.subscribe(0)
    world.store("c")
    snapshot = world.feed.take(subscription)
    assert names(snapshot) == ["b"]
    assert snapshot is not None
    assert snapshot.sequence == BASE + 2
    assert world.feed.take(subscription) == KVEventBatch(BASE + 3, [stored("c")])


def test_a_step_without_changes_is_no_batch(world: World) -> None:
    world.feed.publish([])
    subscription = world.subscribe(BASE + 1)
    world.store("a")
    assert world.feed.take(subscription) == KVEventBatch(BASE + 1, [stored("a")])


def test_who_comes_back_goes_on_where_it_was(world: World) -> None:
    for name in "abc":
        world.store(name)
    subscription = world.subscribe(BASE + 2)
    assert world.feed.take(subscription) == KVEventBatch(BASE + 2, [stored("b")])
    assert world.feed.take(subscription) == KVEventBatch(BASE + 3, [stored("c")])


@pytest.mark.parametrize("start", [BASE - 3, BASE + 1, BASE + 4 + 2, 2**63])
def test_a_number_that_is_not_held_is_a_gap(start: int) -> None:
    """Too old, dropped from the buffer, not given out yet: of another life of the engine, perhaps."""
    world = World(max_events=2)
    for name in "abcd":
        world.store(name)
    snapshot = world.feed.take(world.subscribe(start))
    assert names(snapshot) == ["a", "b", "c", "d"]
    assert snapshot is not None
    assert snapshot.sequence == BASE + 4


def test_the_buffer_counts_events_and_keeps_the_last_batch_however_large(world: World) -> None:
    world = World(max_events=3)
    world.store("a")
    world.store("b", "c")
    assert isinstance(world.feed.take(world.subscribe(BASE + 1)), KVEventBatch)
    world.store("d", "e", "f", "g")
    assert isinstance(world.feed.take(world.subscribe(BASE + 2)), KVSnapshot)
    assert isinstance(world.feed.take(world.subscribe(BASE + 3)), KVEventBatch)


def test_a_slow_subscriber_is_told_that_it_has_lost_its_place() -> None:
    world = World(max_events=2)
    world.store("a")
    subscription = world.subscribe(BASE + 1)
    assert world.feed.take(subscription) is not None
    for name in "bcde":
        world.store(name)
    with pytest.raises(StepwireError, match=f"batch {BASE + 2} is no longer held") as caught:
        world.feed.take(subscription)
    assert caught.value.reason == "SLOW_CLIENT"


def test_only_who_is_behind_and_does_not_take_is_cut() -> None:
    world = World(max_events=2)
    hung, patient = world.subscribe(0), world.subscribe(0)
    for subscription in (hung, patient):
        world.feed.take(subscription)
    world.now = MAX_HANG_S + 1
    # Nothing has happened: there was nothing to take.
    world.feed.cut_hung()
    for name in "abc":
        world.store(name)
        world.feed.take(patient)
    world.cancel.assert_not_called()
    world.feed.cut_hung()
    world.cancel.assert_called_once_with()


def test_subscribers_are_limited_and_the_end_of_one_makes_room(world: World) -> None:
    subscriptions = [world.subscribe(0) for _ in range(MAX_SUBSCRIBERS)]
    with pytest.raises(OverloadedError, match=str(MAX_SUBSCRIBERS)):
        world.subscribe(0)
    world.feed.end(subscriptions[0])
    world.feed.end(subscriptions[0])
    world.subscribe(0)


def test_what_is_held_comes_before_the_end_and_its_error(world: World) -> None:
    subscription = world.subscribe(BASE + 1)
    world.store("a")
    world.feed.close(EngineDeadError("gone"))
    world.feed.close()
    assert world.feed.take(subscription) == KVEventBatch(BASE + 1, [stored("a")])
    with pytest.raises(EngineDeadError, match="gone"):
        world.feed.take(subscription)


@pytest.mark.parametrize("how", ["close", "end", "publish"])
def test_a_waiting_subscriber_wakes_up(world: World, how: str) -> None:
    subscription = world.subscribe(BASE + 1)
    taken: list[KVEventBatch | KVSnapshot | None] = []
    thread = threading.Thread(target=lambda: taken.append(world.feed.take(subscription)))
    thread.start()
    match how:
        case "close":
            world.feed.close()
        case "end":
            world.feed.end(subscription)
        case "publish":
            world.store("a")
    thread.join(30)
    assert taken == ([KVEventBatch(BASE + 1, [stored("a")])] if how == "publish" else [None])


# What happens to the cache in one step, and to a reader: it reads everything, breaks off, or comes back.
steps = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=4)
moves = st.lists(st.one_of(steps, st.sampled_from(["read", "leave", "come back", "clear"])), max_size=40)


class Reader:
    """Resumes as the proto says: one more than the highest sequence received."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listener = KVEventListener()
        self.highest = 0
        self.subscription: Subscription | None = None

    def come_back(self) -> None:
        if self.subscription is None:
            self.subscription = self.world.subscribe(self.highest + 1 if self.highest else 0)

    def leave(self) -> None:
        if self.subscription is not None:
            self.world.feed.end(self.subscription)
            self.subscription = None

    def read(self, last_sequence: int) -> None:
        self.come_back()
        while self.highest < last_sequence:
            assert self.subscription is not None
            try:
                batch = self.world.feed.take(self.subscription)
            except StepwireError:
                self.leave()
                self.come_back()
                continue
            assert batch is not None
            if isinstance(batch, KVSnapshot):
                self.listener.contents.clear()
                self.listener.apply(batch.stored)
            else:
                assert batch.sequence == self.highest + 1
                self.listener.apply(batch.events)
            self.highest = batch.sequence


@given(moves=moves, max_events=st.sampled_from([1, 3, 100]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_a_reader_ends_with_exactly_what_the_cache_holds(moves: list[object], max_events: int) -> None:
    world = World(max_events)
    truth: set[str] = set()
    reader, sequence = Reader(world), BASE
    for move in [*moves, "read"]:
        match move:
            case "read":
                reader.read(sequence)
                assert reader.listener.contents.keys() == {(0, name.encode()) for name in truth}
            case "leave":
                reader.leave()
            case "come back":
                reader.come_back()
            case _:
                events = _change(truth, [] if move == "clear" else move)
                events = [AllBlocksCleared()] if move == "clear" else events
                truth = set() if move == "clear" else truth
                world.feed.publish(events)
                sequence += bool(events)


def _change(truth: set[str], wanted: list[tuple[str, bool]]) -> list[KVEvent]:
    events: list[KVEvent] = []
    for name, is_stored in wanted:
        if is_stored and name not in truth:
            truth.add(name)
            events.append(stored(name))
        elif not is_stored and name in truth:
            truth.discard(name)
            events.append(BlockRemoved(name.encode()))
    return events
