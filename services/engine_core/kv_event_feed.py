"""The feed of prefix cache changes: numbered batches from the loop, kept for subscribers up to a limit.

`publish` never waits. A subscriber is only a place in the one buffer that all share: who is so slow that its place is
dropped has lost the feed, and who comes back with a place that is still held has missed nothing. A copy of what the
cache holds is kept beside it, so that a newcomer's snapshot costs the loop nothing. Free of protobuf.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine_core.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from stepwire.errors import OverloadedError, StepwireError

logger = logging.getLogger(__name__)

# Each holds a thread of the server for its life; routers are few.
MAX_SUBSCRIBERS = 16
# A subscriber that has lost its place and does not even take the news of it hangs in a write.
MAX_HANG_S = 30.0


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Changes of one step."""

    sequence: int
    events: list[KVEvent]


@dataclass(frozen=True, slots=True)
class KVSnapshot:
    """All that can be hit after the batch of that number."""

    sequence: int
    stored: list[BlockStored]


@dataclass(slots=True, eq=False)
class Subscription:
    """One subscriber's place in the feed; guarded by the feed's lock."""

    next_sequence: int
    # Comes before everything else.
    snapshot: KVSnapshot | None
    # Ends the RPC from outside its thread.
    cancel: Callable[[], object]
    last_taken: float
    is_ended: bool = False


class KVEventFeed:
    """Published by the loop, taken by the threads of the subscribers' streams."""

    def __init__(self, last_sequence: int, max_events: int, clock: Callable[[], float]) -> None:
        # What is held: the batches from the first to the last number, without gaps.
        self._first_held = last_sequence + 1
        self._last_sequence = last_sequence
        self._max_events = max_events
        self._clock = clock
        self._changed = threading.Condition()
        self._batches: dict[int, KVEventBatch] = {}
        self._num_events = 0
        # What the cache holds after the last batch, oldest first.
        self._stored: dict[tuple[int, bytes], BlockStored] = {}
        self._subscriptions: set[Subscription] = set()
        self._is_closed = False
        self._error: StepwireError | None = None

    # -- the loop ----------------------------------------------------------------------------------------------------

    def publish(self, events: list[KVEvent]) -> None:
        """The changes of one step; none is no batch."""
        if not events:
            return
        with self._changed:
            self._last_sequence += 1
            self._batches[self._last_sequence] = KVEventBatch(self._last_sequence, events)
            self._num_events += len(events)
            while self._num_events > self._max_events and len(self._batches) > 1:
                self._num_events -= len(self._batches.pop(self._first_held).events)
                self._first_held += 1
            for event in events:
                self._apply(event)
            self._changed.notify_all()

    def close(self, error: StepwireError | None = None) -> None:
        """Nothing follows: streams end after what is held for them, with the error if there is one."""
        with self._changed:
            if not self._is_closed:
                self._is_closed, self._error = True, error
            self._changed.notify_all()

    # -- subscribers -------------------------------------------------------------------------------------------------

    def subscribe(self, start_sequence: int, cancel: Callable[[], object]) -> Subscription:
        """Begin with the batch of that number, or with a snapshot when it is not held."""
        with self._changed:
            if len(self._subscriptions) >= MAX_SUBSCRIBERS:
                raise OverloadedError(f"{MAX_SUBSCRIBERS} subscribers are connected, which is the limit")
            is_held = self._first_held <= start_sequence <= self._last_sequence + 1
            subscription = Subscription(
                next_sequence=start_sequence if is_held else self._last_sequence + 1,
                snapshot=None if is_held else KVSnapshot(self._last_sequence, list(self._stored.values())),
                cancel=cancel,
                last_taken=self._clock(),
            )
            self._subscriptions.add(subscription)
            return subscription

    def take(self, subscription: Subscription) -> KVEventBatch | KVSnapshot | None:
        """Wait for the next batch; None = the end. Raises what ended the feed, or that the place is lost."""
        with self._changed:
            subscription.last_taken = self._clock()
            if subscription.snapshot is not None:
                snapshot, subscription.snapshot = subscription.snapshot, None
                return snapshot
            while not (subscription.is_ended or self._is_closed or subscription.next_sequence <= self._last_sequence):
                self._changed.wait()
            subscription.last_taken = self._clock()
            if subscription.is_ended:
                return None
            if subscription.next_sequence < self._first_held:
                raise StepwireError(
                    f"the subscriber was too slow: batch {subscription.next_sequence} is no longer held",
                    reason="SLOW_CLIENT",
                )
            batch = self._batches.get(subscription.next_sequence)
            if batch is None and self._error is not None:
                raise self._error
            subscription.next_sequence += 1
            return batch

    def end(self, subscription: Subscription) -> None:
        """The subscriber is gone; wakes its thread up. Safe to call twice."""
        with self._changed:
            subscription.is_ended = True
            self._subscriptions.discard(subscription)
            self._changed.notify_all()

    # -- the monitor -------------------------------------------------------------------------------------------------

    def cut_hung(self) -> None:
        """Free the threads of subscribers that have lost their place and do not read either."""
        with self._changed:
            now, first = self._clock(), self._first_held
            hung = [
                subscription
                for subscription in self._subscriptions
                if subscription.next_sequence < first and now - subscription.last_taken > MAX_HANG_S
            ]
        for subscription in hung:
            logger.warning("a subscriber of cache events does not read and is cut")
            subscription.cancel()

    def _apply(self, event: KVEvent) -> None:
        match event:
            case BlockStored():
                self._stored[event.group, event.block_hash] = event
            case BlockRemoved():
                del self._stored[event.group, event.block_hash]
            case AllBlocksCleared():
                self._stored.clear()
