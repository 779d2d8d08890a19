"""Schedulers and requests for tests, with small numbers as defaults. Builds only; checks nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.kv_cache_layout import KVCacheGroup, KVCacheLayout
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.request import Request, RequestKey, SamplingParams, StopConditions
from engine_core.scheduler.scheduler import Scheduler
from engine_core.scheduler.scheduler_config import SchedulerConfig
from engine_core.scheduler.scheduling_policy import SchedulingPolicy

EOS = 2
HASH_SEED = "test"


def request_key(handle: int) -> RequestKey:
    return ("session", handle)


def make_request(
    handle: int,
    prompt: int | Iterable[int],
    *,
    max_tokens: int = 4,
    seed: int = 0,
    stop: StopConditions | None = None,
    **fields: Any,
) -> Request:
    """A request; a number as prompt means that many tokens that no other handle has."""
    if isinstance(prompt, int):
        prompt = range(1000 * handle + 100, 1000 * handle + 100 + prompt)
    return Request(
        key=request_key(handle),
        request_id=f"request-{handle}",
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(seed=seed),
        stop=stop or StopConditions(max_tokens=max_tokens, eos_token_ids=frozenset({EOS})),
        arrival_time=fields.pop("arrival_time", 0.0),
        **fields,
    )


def make_layout(block_size: int, windows: Sequence[int | None] = (None,), max_step_tokens: int = 16) -> KVCacheLayout:
    """One group for each window; None = full attention."""
    groups = tuple(KVCacheGroup(sliding_window=window) for window in windows)
    return KVCacheLayout(block_size, groups, max_step_tokens)


def make_scheduler(
    *,
    num_blocks: int = 17,
    block_size: int = 4,
    enable_caching: bool = True,
    verify_hits: bool = True,
    windows: Sequence[int | None] = (None,),
    **limits: Any,
) -> Scheduler:
    """A scheduler over `num_blocks` blocks, the null block included."""
    config = SchedulerConfig(
        max_num_seqs=limits.pop("max_num_seqs", 4),
        max_num_batched_tokens=limits.pop("max_num_batched_tokens", 16),
        max_model_len=limits.pop("max_model_len", 1000),
        max_queued_requests=limits.pop("max_queued_requests", 100),
        max_queued_tokens=limits.pop("max_queued_tokens", 10_000),
        scheduling_policy=SchedulingPolicy(limits.pop("scheduling_policy", "fcfs")),
        client_classes=ClientClasses(limits.pop("class_weights", {}), limits.pop("best_priorities", {})),
        **limits,
    )
    layout = make_layout(block_size, windows, config.max_num_batched_tokens)
    manager = KVCacheManager(num_blocks, layout, enable_caching=enable_caching, verify_hits=verify_hits)
    return Scheduler(config, manager, BlockHasher(block_size, HASH_SEED))
