"""Deadlines of requests, soonest first, so that a step pays only for those that have passed."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping

from engine_core.scheduler.request import Request, RequestKey
from engine_core.scheduler.request_error import RequestError

DEADLINE = RequestError("DEADLINE", "the deadline of the request has passed")
QUEUE_TIMEOUT = RequestError("QUEUE_TIMEOUT", "the request was not scheduled within its queue timeout", retryable=True)

# Entries of ended requests that may gather before the heap is cleaned.
SLACK = 1024


class Deadlines:
    """Min-heap. Entries of ended requests stay until their time or `forget_ended`."""

    def __init__(self) -> None:
        # (time, order of arrival, request, whether it holds for the waiting time only)
        self._heap: list[tuple[float, int, RequestKey, bool]] = []
        self._num_pushed = 0

    def push(self, request: Request) -> None:
        """Watch both deadlines of a request, as far as it has them."""
        for time, is_queue_deadline in ((request.deadline, False), (request.queue_deadline, True)):
            if time is not None:
                self._num_pushed += 1
                heapq.heappush(self._heap, (time, self._num_pushed, request.key, is_queue_deadline))

    def forget_ended(self, live: Collection[RequestKey]) -> None:
        """Drop the entries of ended requests, once they are many: they must not hold memory until their time."""
        if len(self._heap) <= 2 * len(live) + SLACK:
            return
        self._heap = [entry for entry in self._heap if entry[2] in live]
        heapq.heapify(self._heap)

    @property
    def next_time(self) -> float | None:
        """When the next one passes, of an ended request maybe; None = there is none."""
        return self._heap[0][0] if self._heap else None

    def __len__(self) -> int:
        return len(self._heap)

    def pop_expired(self, now: float, live: Mapping[RequestKey, Request]) -> Iterator[tuple[Request, RequestError]]:
        """Live requests whose time has come, and what that means; the time in the queue is over once they ran."""
        while self._heap and self._heap[0][0] <= now:
            _, _, key, is_queue_deadline = heapq.heappop(self._heap)
            request = live.get(key)
            if request is not None and not (is_queue_deadline and request.was_scheduled):
                yield request, QUEUE_TIMEOUT if is_queue_deadline else DEADLINE
