"""Prometheus metrics of the engine core. The loop keeps plain integers; text is made in the scrape's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine_core.core_proc import EngineCoreProc
from engine_core.kv_cache.residency import RESIDENCY_BUCKETS, BlockResidency, DurationHistogram
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.scheduler.output import SchedulerStats
from engine_core.sessions import Sessions

_PREFIX = "stepwire_engine_core_"

# (name, help, value): series that carry model and engine only.
_GAUGES: list[tuple[str, str, Callable[[SchedulerStats], float]]] = [
    ("requests_running", "Requests in the running batch.", lambda stats: stats.num_running),
    ("requests_waiting", "Requests that wait for room or for a grammar.", lambda stats: stats.num_waiting),
    ("queued_prompt_tokens", "Known tokens of the waiting requests.", lambda stats: stats.num_waiting_tokens),
    (
        "kv_cache_usage_ratio",
        "Share of the KV blocks that requests use, 0 to 1.",
        lambda stats: stats.num_used_blocks / max(1, stats.num_total_blocks),
    ),
]
_COUNTERS: list[tuple[str, str, Callable[[SchedulerStats], float]]] = [
    ("prompt_tokens", "Prompt tokens of completed prefills.", lambda stats: stats.num_prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda stats: stats.num_generation_tokens),
    ("preemptions", "Requests preempted for want of KV blocks.", lambda stats: stats.num_preemptions),
    ("prefix_cache_query_tokens", "Tokens looked up in the prefix cache.", lambda stats: stats.prefix_query_tokens),
    ("prefix_cache_hit_tokens", "Tokens found in the prefix cache.", lambda stats: stats.prefix_hit_tokens),
    (
        "prefix_cache_preempted_query_tokens",
        "Tokens looked up again after a preemption; not in the look-ups above.",
        lambda stats: stats.preempted_query_tokens,
    ),
    (
        "prefix_cache_preempted_hit_tokens",
        "Tokens found again after a preemption.",
        lambda stats: stats.preempted_hit_tokens,
    ),
    ("kv_evictions", "Cached blocks handed out again.", lambda stats: stats.num_evictions),
    ("kv_hash_collisions", "Hits whose tokens differed; above 0 is an alarm.", lambda stats: stats.num_collisions),
]
# Sampled; served when --kv-cache-metrics is on.
_RESIDENCY: list[tuple[str, str, Callable[[BlockResidency], DurationHistogram]]] = [
    ("kv_block_lifetime_seconds", "From handing a KV block out to its eviction.", lambda found: found.lifetimes),
    (
        "kv_block_idle_before_evict_seconds",
        "From the last time an evicted KV block was handed out or hit.",
        lambda found: found.idle_before_evict,
    ),
    ("kv_block_reuse_gap_seconds", "Between two uses of a KV block that was hit.", lambda found: found.reuse_gaps),
]


class EngineCollector:
    """Renders the newest snapshot. `proc` is None until the model is loaded: all series start at 0."""

    def __init__(self, lifecycle: EngineLifecycle, sessions: Sessions, engine_id: str) -> None:
        self._lifecycle = lifecycle
        self._sessions = sessions
        self._engine_id = engine_id
        self.proc: EngineCoreProc | None = None

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        stats = self.proc.latest_stats if self.proc else SchedulerStats()
        names = ["model_name", "engine_id"]
        values = [self.proc.core.config.served_model.name if self.proc else "", self._engine_id]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=names)
            gauge.add_metric(values, read(stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(_PREFIX + name, text, labels=names)
            counter.add_metric(values, read(stats))
            yield counter
        yield from self._of_blocks(names, values, stats)
        yield from self._of_residency(names, values)
        yield from self._of_requests(names, values)
        yield from self._of_process(names, values)
        pending = GaugeMetricFamily(
            _PREFIX + "grammars_pending", "Grammars being compiled or queued for it.", labels=names
        )
        manager = self.proc.core.structured_output if self.proc else None
        pending.add_metric(values, manager.num_pending if manager else 0)
        yield pending

    def _of_blocks(self, names: list[str], values: list[str], stats: SchedulerStats) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(_PREFIX + "kv_blocks", "KV blocks by state.", labels=[*names, "state"])
        num_free = stats.num_total_blocks - stats.num_used_blocks - stats.num_cached_blocks
        for state, number in (
            ("used", stats.num_used_blocks),
            ("cached", stats.num_cached_blocks),
            ("free", num_free),
        ):
            blocks.add_metric([*values, state], number)
        yield blocks

    def _of_residency(self, names: list[str], values: list[str]) -> Iterator[Metric]:
        residency = self.proc.core.scheduler.kv_cache_manager.pool.residency if self.proc else None
        if residency is None:
            return
        for name, text, read in _RESIDENCY:
            histogram = HistogramMetricFamily(_PREFIX + name, text, labels=names)
            found = read(residency)
            # Copied first: the loop may count on meanwhile, and the buckets must add up.
            bounds = [*map(str, RESIDENCY_BUCKETS), "+Inf"]
            buckets = list(zip(bounds, accumulate(list(found.counts)), strict=True))
            histogram.add_metric(values, buckets, found.sum_s)
            yield histogram

    def _of_requests(self, names: list[str], values: list[str]) -> Iterator[Metric]:
        rejected = self.proc.num_rejected.snapshot() if self.proc else {}
        aborted = self.proc.core.num_aborted.snapshot() if self.proc else {}
        for name, text, counts in (
            ("requests_rejected", "Requests refused before they were queued.", rejected),
            ("requests_aborted", "Requests ended from outside.", aborted),
        ):
            counter = CounterMetricFamily(_PREFIX + name, text, labels=[*names, "reason"])
            for reason, number in counts.items():
                counter.add_metric([*values, reason], number)
            yield counter

    def _of_process(self, names: list[str], values: list[str]) -> Iterator[Metric]:
        state = GaugeMetricFamily(_PREFIX + "state", "1 for the current state.", labels=[*names, "state"])
        for candidate in EngineState:
            state.add_metric([*values, candidate.name.lower()], candidate is self._lifecycle.state)
        yield state
        sessions = GaugeMetricFamily(_PREFIX + "sessions", "Frontends connected.", labels=[*names, "state"])
        sessions.add_metric([*values, "live"], len(self._sessions))
        yield sessions
        progress = self.proc.progress if self.proc else None
        age = GaugeMetricFamily(_PREFIX + "step_age_seconds", "Age of the running step; 0 between steps.", labels=names)
        age.add_metric(values, progress.age_s() if progress else 0)
        yield age
        steps = CounterMetricFamily(_PREFIX + "steps", "Steps completed.", labels=names)
        steps.add_metric(values, progress.num_steps if progress else 0)
        yield steps
        depth = GaugeMetricFamily(_PREFIX + "queue_depth", "Messages waiting.", labels=[*names, "queue"])
        for queue_name, number in self._queue_depths():
            depth.add_metric([*values, queue_name], number)
        yield depth

    def _queue_depths(self) -> Iterator[tuple[str, int]]:
        proc = self.proc
        yield "input", proc.input_queue.qsize() if proc else 0
        yield "output", proc.output_queue.depth if proc else 0
        yield "aborts", proc.aborts_queue.qsize() if proc else 0
