"""Whether a request may be queued at all, and behind what. Pure; the only place where "never fits" is decided."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.scheduler.request import EventType, Request, RequestEvent
from engine_core.scheduler.request_error import RequestError
from engine_core.scheduler.request_queue import RequestQueue
from engine_core.scheduler.scheduler_config import SchedulerConfig

# Advice with QUEUE_FULL; the queue moves at the pace of finished answers, which is seconds.
RETRY_AFTER_MS = 1000


def admission_error(
    request: Request, queues: Sequence[RequestQueue], kv_cache_manager: KVCacheManager, config: SchedulerConfig
) -> RequestError | None:
    """Why the request is refused, or None. What is queued fits the whole cache, so that it can always progress."""
    if not kv_cache_manager.can_ever_fit(request.max_num_tokens):
        capacity = kv_cache_manager.layout.longest_that_fits(kv_cache_manager.pool.num_total, request.max_num_tokens)
        return RequestError(
            "KV_CAPACITY",
            f"prompt and max_tokens need {request.max_num_tokens} tokens of KV cache; it holds {capacity}",
        )
    num_queued_requests = sum(map(len, queues))
    if num_queued_requests >= config.max_queued_requests:
        return _queue_full(f"{num_queued_requests} requests are queued; the limit is {config.max_queued_requests}")
    # An empty queue takes any request: a limit below one prompt would refuse it for ever, and call that temporary.
    num_queued_tokens = sum(queue.num_tokens for queue in queues)
    if num_queued_requests and num_queued_tokens + request.num_tokens > config.max_queued_tokens:
        return _queue_full(f"{num_queued_tokens} tokens are queued; the limit is {config.max_queued_tokens}")
    return None


def queued_event(queues: Sequence[RequestQueue], now: float) -> RequestEvent:
    """It is about to join them. Under a policy other than FCFS later ones may pass it, and it may pass some."""
    facts = {"position": sum(map(len, queues)), "waiting_tokens_ahead": sum(queue.num_tokens for queue in queues)}
    return RequestEvent(EventType.QUEUED, now, facts)


def _queue_full(message: str) -> RequestError:
    return RequestError("QUEUE_FULL", message, retryable=True, retry_after_ms=RETRY_AFTER_MS)
