"""Rows about requests: how long they took, how they were refused, aborted or failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from engine_core.metrics.engine_view import LABELS, PREFIX, EngineView
from engine_core.scheduler.request_times import LATENCY_BUCKETS, PREEMPTION_BUCKETS, TOKEN_BUCKETS, RequestTimes
from stepwire.histogram import Histogram
from stepwire.metric_rows import MetricRow, counter, histogram

_HISTOGRAMS: dict[MetricRow, Callable[[RequestTimes], Histogram]] = {
    histogram(
        f"{PREFIX}request_queue_seconds",
        "From the queue to the first scheduling.",
        LATENCY_BUCKETS,
        LABELS,
        "vllm:request_queue_time_seconds",
    ): lambda times: times.queue,
    histogram(
        f"{PREFIX}request_prefill_seconds",
        "From the first scheduling to the first token.",
        LATENCY_BUCKETS,
        LABELS,
        "vllm:request_prefill_time_seconds",
    ): lambda times: times.prefill,
    histogram(
        f"{PREFIX}request_decode_seconds",
        "From the first token to the last one.",
        LATENCY_BUCKETS,
        LABELS,
        "vllm:request_decode_time_seconds",
    ): lambda times: times.decode,
    histogram(
        f"{PREFIX}request_inference_seconds",
        "From the first scheduling to the last token.",
        LATENCY_BUCKETS,
        LABELS,
        "vllm:request_inference_time_seconds",
    ): lambda times: times.inference,
    histogram(
        f"{PREFIX}request_prefill_computed_tokens",
        "Prompt tokens of a request that were not in the prefix cache.",
        TOKEN_BUCKETS,
        LABELS,
        "vllm:request_prefill_kv_computed_tokens",
    ): lambda times: times.computed_tokens,
    histogram(
        f"{PREFIX}request_preemptions", "Preemptions of a request that has ended.", PREEMPTION_BUCKETS, LABELS
    ): lambda times: times.preemptions,
}
_BY_REASON = (*LABELS, "reason")
_REJECTED = counter(f"{PREFIX}requests_rejected_total", "Requests refused before they were queued.", _BY_REASON)
_ABORTED = counter(f"{PREFIX}requests_aborted_total", "Requests ended from outside.", _BY_REASON)
_ERRORS = counter(f"{PREFIX}request_errors_total", "Requests that failed; the engine lives.", _BY_REASON)
# All that an engine can give, so that the first failure is a change of a series that is there.
ERROR_REASONS = ("REQUEST_FAILED", "GRAMMAR_INVALID", "GRAMMAR_VIOLATION", "QUEUE_TIMEOUT", "DEADLINE")
ROWS = (*_HISTOGRAMS, _REJECTED, _ABORTED, _ERRORS)


def collect(view: EngineView) -> Iterator[Metric]:
    """Called for each scrape."""
    proc = view.proc
    times = proc.core.scheduler.counters.times if proc else RequestTimes()
    for row, read in _HISTOGRAMS.items():
        yield row.histogram_family([(view.labels, read(times))])
    yield _REJECTED.family(view.by(proc.num_rejected.snapshot() if proc else {}))
    yield _ABORTED.family(view.by(proc.core.num_aborted.snapshot() if proc else {}))
    yield _ERRORS.family(view.by(_errors(view)))


def _errors(view: EngineView) -> dict[str, int]:
    if view.proc is None:
        return {}
    found = Counter(dict.fromkeys(ERROR_REASONS, 0))
    # Counter.update adds: a reason may be counted in both places.
    found.update(view.proc.num_unreadable.snapshot())
    found.update(view.proc.core.scheduler.counters.errors.copy())
    return found
