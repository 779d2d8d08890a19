"""A heap whose items can be found, moved and taken out by key. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Order = tuple[float, ...]

# Entries of items that have left or moved, which may gather before the heap is cleaned.
SLACK = 64


class LazyHeap(Generic[K, T]):
    """Least order first; equal ones as they came. O(log n): what leaves or moves is dropped once it reaches the top."""

    def __init__(self) -> None:
        # (order, running number, key): two entries never compare beyond the number. Not the item, which would live on.
        self._heap: list[tuple[Order, int, K]] = []
        self._live: dict[K, tuple[tuple[Order, int, K], T]] = {}
        self._num_put = 0

    def __len__(self) -> int:
        return len(self._live)

    def put(self, key: K, order: Order, item: T) -> None:
        """Add an item, or move it."""
        self._num_put += 1
        entry = (order, self._num_put, key)
        self._live[key] = (entry, item)
        heapq.heappush(self._heap, entry)
        self._clean()

    def get(self, key: K) -> T | None:
        found = self._live.get(key)
        return None if found is None else found[1]

    def remove(self, key: K) -> None:
        """Raises KeyError for a stranger."""
        del self._live[key]
        self._clean()

    def first(self) -> T | None:
        """The item of the least order; None when there is none."""
        while self._heap:
            entry = self._heap[0]
            found = self._live.get(entry[2])
            if found is not None and found[0] is entry:
                return found[1]
            heapq.heappop(self._heap)
        return None

    def items(self) -> list[tuple[K, T]]:
        """All, in no order. O(n)."""
        return [(key, item) for key, (_, item) in self._live.items()]

    def _clean(self) -> None:
        """Drop what has left, once it is most of the heap: keys must not hold memory until they reach the top."""
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [entry for entry, _ in self._live.values()]
            heapq.heapify(self._heap)
