"""When the busy loop publishes what changed in the prefix cache: with each step and each operation, in one batch."""

from __future__ import annotations

from engine_core import operations as op
from engine_core.kv_cache.events import AllBlocksCleared, BlockStored, KVEvent
from engine_core.kv_event_feed import KVEventBatch, KVEventFeed
from fakes.looped_engine import LoopedEngine


class PublishingEngine:
    """An engine with a feed, and everything that came out of it."""

    def __init__(self, **settings: object) -> None:
        self.feed = KVEventFeed(100, 1000, lambda: 0.0)
        self.engine = LoopedEngine(kv_event_feed=self.feed, **settings)
        self._subscription = self.feed.subscribe(101, lambda: None)

    def batches(self) -> list[list[KVEvent]]:
        """The events of each batch since the last call."""
        found: list[list[KVEvent]] = []
        while self._subscription.next_sequence <= self.feed._last_sequence:
            batch = self.feed.take(self._subscription)
            assert isinstance(batch, KVEventBatch)
            found.append(batch.events)
        return found


def stored_counts(batches: list[list[KVEvent]]) -> list[int]:
    assert all(isinstance(event, BlockStored) for events in batches for event in events)
    return [len(events) for events in batches]


def test_one_batch_for_each_step_that_changed_something() -> None:
    publishing = PublishingEngine(block_size=4)
    # Two prompts of two full blocks; each gets its third block full with the fifth step.
    for handle in (1, 2):
        publishing.engine.add(handle, num_prompt=9, max_tokens=6)
    publishing.engine.run()
    assert stored_counts(publishing.batches()) == [4, 2]


def test_a_hit_publishes_nothing() -> None:
    publishing = PublishingEngine(block_size=4)
    publishing.engine.add(1, num_prompt=9, max_tokens=1)
    publishing.engine.run()
    publishing.batches()
    publishing.engine.finishes.clear()
    publishing.engine.add(1, num_prompt=9, max_tokens=1)
    publishing.engine.run()
    assert publishing.engine.scheduler.stats().prefix_hit_tokens == 8
    assert publishing.batches() == []


def test_a_reset_is_published_by_its_operation() -> None:
    publishing = PublishingEngine(block_size=4)
    publishing.engine.add(1, num_prompt=9, max_tokens=1)
    publishing.engine.run()
    publishing.batches()
    publishing.engine.call(op.ResetPrefixCache(reset_running_requests=False))
    assert publishing.batches() == [[AllBlocksCleared()]]


def test_an_operation_of_a_busy_engine_is_published_before_the_next_step() -> None:
    publishing = PublishingEngine(block_size=4)
    publishing.engine.add(1, num_prompt=9, max_tokens=50)
    publishing.engine.turn()
    publishing.batches()
    publishing.engine.send(op.ResetPrefixCache(reset_running_requests=True))
    publishing.engine.turn()
    cleared, computed_again = publishing.batches()
    assert cleared == [AllBlocksCleared()]
    assert stored_counts([computed_again]) == [2]


def test_memory_given_back_by_a_sleep_is_published() -> None:
    """The sleep begins when the loop is idle, behind the operation and without a step."""
    publishing = PublishingEngine(block_size=4)
    publishing.engine.add(1, num_prompt=9, max_tokens=1)
    publishing.engine.run()
    publishing.batches()
    publishing.engine.call(op.Sleep(op.SleepLevel.OFFLOAD_WEIGHTS, op.PauseMode.KEEP))
    assert publishing.batches() == [[AllBlocksCleared()]]


def test_without_a_feed_nothing_is_collected() -> None:
    engine = LoopedEngine(block_size=4)
    engine.add(1, num_prompt=9, max_tokens=6)
    engine.run()
    assert engine.scheduler.kv_cache_manager.pool.take_events() == []
