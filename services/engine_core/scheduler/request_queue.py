"""Waiting requests in the order in which they are to be served: first come, first served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine_core.scheduler.request import Request


class RequestQueue:
    """FCFS queue with O(1) removal anywhere, because aborts and deadlines hit any position."""

    def __init__(self) -> None:
        self._requests: OrderedDict[tuple[str, int], Request] = OrderedDict()
        # Known tokens of all waiting requests: the queue's length in work, kept up to date by every change.
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def append(self, request: Request) -> None:
        """A new request: served last."""
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens

    def prepend(self, request: Request) -> None:
        """A preempted request: served first, it has waited before."""
        self.append(request)
        self._requests.move_to_end(request.key, last=False)

    def peek(self) -> Request:
        """The request to be served next; the queue is not empty."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        del self._requests[request.key]
        self.num_tokens -= request.num_tokens
