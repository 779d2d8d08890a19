"""Requests that wait, as a set: who they are, how many, how much work. `waiting_queue` adds an order."""

from __future__ import annotations

from collections.abc import Iterator

from engine_core.scheduler.request import Request, RequestKey


class RequestQueue:
    """Removal anywhere is O(1), because aborts and deadlines hit any request."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, Request] = {}
        # Known tokens of all waiting requests: the queue's length in work, kept up to date by every change.
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest request that was never scheduled arrived; walks all of them."""
        never_scheduled = (one.arrival_time for one in self._requests.values() if not one.was_scheduled)
        return min(never_scheduled, default=None)

    def append(self, request: Request) -> None:
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        del self._requests[request.key]
        self.num_tokens -= request.num_tokens
