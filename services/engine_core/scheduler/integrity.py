"""Invariants of scheduler and KV cache in words. Walks everything: never in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.scheduler.request import Request, RequestKey
from engine_core.scheduler.request_queue import RequestQueue


def broken_invariants(
    requests: Mapping[RequestKey, Request],
    queues: Sequence[RequestQueue],
    running: Sequence[Request],
    kv_cache_manager: KVCacheManager,
) -> list[str]:
    """What does not hold; empty = sound."""
    found = kv_cache_manager.check_integrity()
    num_owned = kv_cache_manager.pool.num_used - kv_cache_manager.num_fenced_blocks
    if not requests and num_owned:
        found.append(f"no request, but {num_owned} blocks are in use")
    if any(request.num_in_flight_tokens for queue in queues for request in queue):
        found.append("a request that does not run has tokens in flight")
    if any(request.num_in_flight_tokens < 0 for request in running):
        found.append("more tokens came in than were in flight")
    placed = [request.key for queue in queues for request in queue] + [request.key for request in running]
    if len(placed) != len(requests) or set(placed) != set(requests):
        found.append("a request is in no queue, or in two")
    if any(queue.num_tokens != sum(request.num_tokens for request in queue) for queue in queues):
        found.append("the number of queued tokens is wrong")
    if any(queue.num_uncached_tokens != sum(request.num_uncached_tokens for request in queue) for queue in queues):
        found.append("the number of queued tokens that are not cached is wrong")
    return found
