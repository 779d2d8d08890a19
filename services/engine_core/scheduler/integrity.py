"""The scheduler's own invariants in words, apart from those of the KV cache. Walks everything: never in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_core.scheduler.request import Request, RequestKey
from engine_core.scheduler.request_queue import RequestQueue


def broken_invariants(
    requests: Mapping[RequestKey, Request], queues: Sequence[RequestQueue], running: Sequence[Request]
) -> list[str]:
    """What does not hold; empty = sound."""
    found: list[str] = []
    placed = [request.key for queue in queues for request in queue] + [request.key for request in running]
    if len(placed) != len(requests) or set(placed) != set(requests):
        found.append("a request is in no queue, or in two")
    if any(queue.num_tokens != sum(request.num_tokens for request in queue) for queue in queues):
        found.append("the number of queued tokens is wrong")
    return found
