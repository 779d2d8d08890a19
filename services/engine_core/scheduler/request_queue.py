"""Requests that wait, as a set: who they are, how many, how much work. `waiting_queue` adds an order."""

from __future__ import annotations

from collections.abc import Iterator

from engine_core.scheduler.lazy_heap import Order
from engine_core.scheduler.request import Request, RequestKey
from engine_core.scheduler.service_order import KeyOrder


class RequestQueue:
    """Removal anywhere is O(1), because aborts and deadlines hit any request."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, Request] = {}
        # Known tokens of all waiting requests: the queue's length in work, kept up to date by every change.
        self.num_tokens = 0
        # Of these what the prefix cache did not hold when the requests came.
        self.num_uncached_tokens = 0
        self._never_scheduled = KeyOrder(_by_arrival)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest request that was never scheduled arrived."""
        oldest = self._never_scheduled.peek()
        return None if oldest is None else oldest.arrival_time

    def append(self, request: Request) -> None:
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens
        self.num_uncached_tokens += request.num_uncached_tokens
        if not request.was_scheduled:
            self._never_scheduled.append(request)

    def remove(self, request: Request) -> None:
        del self._requests[request.key]
        self.num_tokens -= request.num_tokens
        self.num_uncached_tokens -= request.num_uncached_tokens
        if not request.was_scheduled:
            self._never_scheduled.remove(request)


def _by_arrival(request: Request) -> Order:
    return (request.arrival_time,)
