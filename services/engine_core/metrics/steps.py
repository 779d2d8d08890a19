"""Rows about the step loop: what its steps were, how long their phases took, whether it gets on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from engine_core.metrics.engine_view import LABELS, PREFIX, EngineView
from engine_core.step_costs import StepCosts
from engine_core.step_times import ITERATION_BUCKETS, RATIO_BUCKETS, StepTimes
from stepwire.histogram import Histogram
from stepwire.metric_rows import MetricRow, counter, gauge, histogram
from stepwire.metrics import FAST_BUCKETS

_PHASES = histogram(
    f"{PREFIX}step_phase_seconds",
    "Phases of a step; what the loop costs is all of it but execute.",
    FAST_BUCKETS,
    (*LABELS, "phase"),
)
_DURATIONS = histogram(
    f"{PREFIX}step_duration_seconds",
    "Turns of the loop that took in the results of a step.",
    FAST_BUCKETS,
    (*LABELS, "kind"),
)
_STEPS = counter(f"{PREFIX}steps_total", "Steps completed.", (*LABELS, "kind"))
_HISTOGRAMS: dict[MetricRow, Callable[[StepTimes], Histogram]] = {
    histogram(
        f"{PREFIX}iteration_tokens", "Tokens of a step.", ITERATION_BUCKETS, LABELS, "vllm:iteration_tokens_total"
    ): lambda times: times.tokens,
    histogram(
        f"{PREFIX}batch_occupancy_ratio", "Requests of a step / max_num_seqs.", RATIO_BUCKETS, LABELS
    ): lambda times: times.occupancy,
    histogram(
        f"{PREFIX}token_budget_used_ratio", "Tokens of a step / max_num_batched_tokens.", RATIO_BUCKETS, LABELS
    ): lambda times: times.budget_used,
}
_AGE = gauge(f"{PREFIX}step_age_seconds", "Age of the running step; 0 between steps.", LABELS)
_PROGRESS = gauge(
    f"{PREFIX}last_progress_timestamp_seconds", "Unix time at which the loop last completed something.", LABELS
)
_DEPTH = gauge(f"{PREFIX}queue_depth", "Messages waiting.", (*LABELS, "queue"))
# Of one worker, as the aliases; with --mfu-metrics only.
COSTS: dict[MetricRow, Callable[[StepCosts], float]] = {
    counter(
        f"{PREFIX}estimated_flops_total",
        "Floating-point operations of the steps for one worker, estimated from their plans.",
        LABELS,
        "vllm:estimated_flops_per_gpu_total",
    ): lambda costs: costs.flops / costs.num_workers,
    counter(
        f"{PREFIX}estimated_read_bytes_total",
        "Bytes of weights and of the KV cache that they read for one worker, estimated.",
        LABELS,
        "vllm:estimated_read_bytes_per_gpu_total",
    ): lambda costs: costs.read_bytes / costs.num_workers,
    counter(
        f"{PREFIX}estimated_write_bytes_total",
        "Bytes of the KV cache that they write for one worker, estimated.",
        LABELS,
        "vllm:estimated_write_bytes_per_gpu_total",
    ): lambda costs: costs.write_bytes / costs.num_workers,
}
ROWS = (_PHASES, _DURATIONS, _STEPS, *_HISTOGRAMS, _AGE, _PROGRESS, _DEPTH, *COSTS)


def collect(view: EngineView) -> Iterator[Metric]:
    """Called for each scrape."""
    times = view.proc.core.times if view.proc else StepTimes(1, 1)
    durations = {kind.value: found for kind, found in times.durations.items()}
    yield _PHASES.histogram_family(view.histograms_by(times.phases))
    yield _DURATIONS.histogram_family(view.histograms_by(durations))
    yield _STEPS.family(view.by({kind: found.count for kind, found in durations.items()}))
    for row, read in _HISTOGRAMS.items():
        yield row.histogram_family([(view.labels, read(times))])
    progress = view.proc.progress if view.proc else None
    yield _AGE.family([(view.labels, progress.age_s() if progress else 0)])
    # The loop knows no wall clock: only a difference is laid on it, now.
    yield _PROGRESS.family([(view.labels, time.time() - progress.silence_s() if progress else 0)])
    yield _DEPTH.family(view.by(_queue_depths(view)))
    costs = view.proc.core.step_costs if view.proc else None
    if costs is not None:
        for cost_row, read_cost in COSTS.items():
            yield cost_row.family([(view.labels, read_cost(costs))])


def _queue_depths(view: EngineView) -> dict[str, float]:
    proc = view.proc
    return {
        "input": proc.input_queue.qsize() if proc else 0,
        "output": proc.output_queue.depth if proc else 0,
        "aborts": proc.aborts_queue.qsize() if proc else 0,
    }
