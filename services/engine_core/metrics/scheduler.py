"""Rows of the scheduler's snapshot: queues, KV cache, prefix cache, token counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from engine_core.metrics.engine_view import LABELS, PREFIX, EngineView
from engine_core.scheduler.output import SchedulerStats
from stepwire.metric_rows import MetricRow, counter, gauge

Read = Callable[[SchedulerStats], float]

_PLAIN: dict[MetricRow, Read] = {
    gauge(
        f"{PREFIX}requests_running", "Requests in the running batch.", LABELS, "vllm:num_requests_running"
    ): lambda stats: stats.num_running,
    gauge(
        f"{PREFIX}requests_waiting",
        "Requests that wait for room or for a grammar.",
        LABELS,
        "vllm:num_requests_waiting",
    ): lambda stats: stats.num_waiting,
    gauge(
        f"{PREFIX}queued_prompt_tokens",
        "Known tokens of the waiting requests that the prefix cache did not hold when they came.",
        LABELS,
    ): lambda stats: stats.num_waiting_tokens,
    gauge(
        f"{PREFIX}kv_cache_usage_ratio",
        "Share of the KV blocks that requests use, 0 to 1.",
        LABELS,
        "vllm:kv_cache_usage_perc",
    ): lambda stats: stats.num_used_blocks / max(1, stats.num_total_blocks),
    counter(
        f"{PREFIX}prompt_tokens_total", "Prompt tokens of completed prefills.", LABELS, "vllm:prompt_tokens_total"
    ): lambda stats: stats.num_prompt_tokens,
    counter(
        f"{PREFIX}prompt_tokens_cached_total",
        "Of these, tokens found in the prefix cache.",
        LABELS,
        "vllm:prompt_tokens_cached_total",
    ): lambda stats: stats.num_cached_prompt_tokens,
    counter(
        f"{PREFIX}generation_tokens_total", "Tokens generated.", LABELS, "vllm:generation_tokens_total"
    ): lambda stats: stats.num_generation_tokens,
    counter(
        f"{PREFIX}preemptions_total",
        "Requests preempted for want of KV blocks.",
        LABELS,
        "vllm:num_preemptions_total",
    ): lambda stats: stats.num_preemptions,
    counter(
        f"{PREFIX}prefix_cache_query_tokens_total",
        "Tokens looked up in the prefix cache.",
        LABELS,
        "vllm:prefix_cache_queries_total",
    ): lambda stats: stats.prefix_query_tokens,
    counter(
        f"{PREFIX}prefix_cache_hit_tokens_total",
        "Tokens found in the prefix cache.",
        LABELS,
        "vllm:prefix_cache_hits_total",
    ): lambda stats: stats.prefix_hit_tokens,
    counter(
        f"{PREFIX}prefix_cache_preempted_query_tokens_total",
        "Tokens looked up again after a preemption; not in the look-ups above.",
        LABELS,
    ): lambda stats: stats.preempted_query_tokens,
    counter(
        f"{PREFIX}prefix_cache_preempted_hit_tokens_total", "Tokens found again after a preemption.", LABELS
    ): lambda stats: stats.preempted_hit_tokens,
    counter(f"{PREFIX}kv_evictions_total", "Cached blocks handed out again.", LABELS): lambda stats: (
        stats.num_evictions
    ),
    counter(
        f"{PREFIX}kv_hash_collisions_total", "Hits whose tokens differed; above 0 is an alarm.", LABELS
    ): lambda stats: stats.num_collisions,
}
_WAITING_BY_REASON = gauge(
    f"{PREFIX}requests_waiting_by_reason",
    "Waiting requests: for room (capacity) or for a grammar (deferred).",
    (*LABELS, "reason"),
    "vllm:num_requests_waiting_by_reason",
)
_PROMPT_TOKENS_BY_SOURCE = counter(
    f"{PREFIX}prompt_tokens_by_source_total",
    "Prompt tokens of completed prefills, by where their KV came from.",
    (*LABELS, "source"),
    "vllm:prompt_tokens_by_source_total",
)
_KV_BLOCKS = gauge(f"{PREFIX}kv_blocks", "KV blocks by state.", (*LABELS, "state"))
_OLDEST_WAITING = gauge(
    f"{PREFIX}oldest_waiting_seconds", "Age of the oldest request that was never scheduled; 0 = none waits.", LABELS
)
_FENCED = gauge(
    f"{PREFIX}kv_fenced_blocks", "KV blocks that are free but for a step in flight that may still write them.", LABELS
)
# With --check-nan only.
_CORRUPTED = counter(
    f"{PREFIX}corrupted_requests_total",
    "Requests for which the model has computed NaN.",
    LABELS,
    "vllm:corrupted_requests_total",
)
ROWS = (*_PLAIN, _WAITING_BY_REASON, _PROMPT_TOKENS_BY_SOURCE, _KV_BLOCKS, _OLDEST_WAITING, _FENCED, _CORRUPTED)


def collect(view: EngineView) -> Iterator[Metric]:
    """Called for each scrape."""
    stats = view.stats
    for row, read in _PLAIN.items():
        yield row.family([(view.labels, read(stats))])
    yield _WAITING_BY_REASON.family(view.by(_waiting(stats)))
    yield _PROMPT_TOKENS_BY_SOURCE.family(view.by(_sources(stats)))
    yield _KV_BLOCKS.family(view.by(_blocks(stats)))
    yield _OLDEST_WAITING.family([(view.labels, _oldest_waiting_s(view))])
    manager = view.proc.core.scheduler.kv_cache_manager if view.proc else None
    yield _FENCED.family([(view.labels, manager.num_fenced_blocks if manager else 0)])
    if view.checks_nan:
        yield _CORRUPTED.family([(view.labels, stats.num_corrupted)])


def _waiting(stats: SchedulerStats) -> Mapping[str, float]:
    deferred = stats.num_waiting_deferred
    return {"capacity": stats.num_waiting - deferred, "deferred": deferred}


def _sources(stats: SchedulerStats) -> Mapping[str, float]:
    cached = stats.num_cached_prompt_tokens
    return {"local_compute": stats.num_prompt_tokens - cached, "local_cache_hit": cached}


def _blocks(stats: SchedulerStats) -> Mapping[str, float]:
    used, cached = stats.num_used_blocks, stats.num_cached_blocks
    return {"used": used, "cached": cached, "free": stats.num_total_blocks - used - cached}


def _oldest_waiting_s(view: EngineView) -> float:
    since = view.stats.oldest_waiting_time
    return 0.0 if since is None or view.proc is None else max(0.0, view.proc.core.clock() - since)
