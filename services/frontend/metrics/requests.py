"""Rows about requests, and the series of one model on one engine. Written on the event loop."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from stepwire.metric_rows import Histograms, MetricRow, counter, histogram
from stepwire.metrics import (
    COUNT_BUCKETS,
    ITL_BUCKETS,
    REQUEST_LATENCY_BUCKETS,
    TOKEN_COUNT_BUCKETS,
    TTFT_BUCKETS,
    WIDE_BUCKETS,
)

FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition", "rejected")
MODEL_LABELS = ("model_name", "engine_id")

ABORTED = counter("stepwire_frontend_requests_aborted_total", "Choices aborted in the engine, by reason.", ("reason",))
SLOW_CLIENT_CUTS = counter("stepwire_frontend_slow_client_cuts_total", "Streams cut because nobody read them.")
DELTAS_MERGED = counter(
    "stepwire_frontend_deltas_merged_total", "Pieces of output that joined others because their reader was behind."
)
ADMISSION = histogram(
    "stepwire_frontend_admission_seconds", "From the start of a request to its place in the engine.", WIDE_BUCKETS
)
FINISHED = counter(
    "stepwire_frontend_requests_finished_total",
    "Choices ended, each exactly once; engine_id is empty where none had been asked.",
    (*MODEL_LABELS, "finished_reason"),
    "vllm:request_success_total",
    alias_skips=frozenset({"rejected"}),
)


def _of_model(name: str, help_: str, buckets: tuple[float, ...], alias: str) -> MetricRow:
    return histogram(f"stepwire_frontend_{name}", help_, buckets, MODEL_LABELS, f"vllm:{alias}")


PROMPT_TOKENS = _of_model(
    "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_COUNT_BUCKETS, "request_prompt_tokens"
)
GENERATION_TOKENS = _of_model(
    "request_generation_tokens",
    "Output tokens of a request, over its choices.",
    TOKEN_COUNT_BUCKETS,
    "request_generation_tokens",
)
MAX_GENERATION_TOKENS = _of_model(
    "request_max_generation_tokens",
    "Output tokens of the longest choice of a request.",
    TOKEN_COUNT_BUCKETS,
    "request_max_num_generation_tokens",
)
MAX_TOKENS = _of_model(
    "request_max_tokens",
    "Most output tokens that a choice of a request may have.",
    TOKEN_COUNT_BUCKETS,
    "request_params_max_tokens",
)
CHOICES = _of_model("request_choices", "Choices of a request.", COUNT_BUCKETS, "request_params_n")
TTFT = _of_model(
    "time_to_first_token_seconds",
    "Arrival to first token, frontend clock.",
    TTFT_BUCKETS,
    "time_to_first_token_seconds",
)
ITL = _of_model(
    "inter_token_latency_seconds",
    "Token batch to next token batch of one choice.",
    ITL_BUCKETS,
    "inter_token_latency_seconds",
)
TIME_PER_TOKEN = _of_model(
    "request_time_per_output_token_seconds",
    "Mean time of a request's output tokens behind the first of each choice.",
    ITL_BUCKETS,
    "request_time_per_output_token_seconds",
)
DURATION = _of_model(
    "request_duration_seconds",
    "Arrival to the end of the answer.",
    REQUEST_LATENCY_BUCKETS,
    "e2e_request_latency_seconds",
)
_HISTOGRAMS = (
    *(PROMPT_TOKENS, GENERATION_TOKENS, MAX_GENERATION_TOKENS, MAX_TOKENS, CHOICES),
    *(TTFT, ITL, TIME_PER_TOKEN, DURATION),
)
ROWS = (ABORTED, SLOW_CLIENT_CUTS, DELTAS_MERGED, ADMISSION, FINISHED, *_HISTOGRAMS)


class RequestMetrics:
    """The series of all models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.admission = ADMISSION.histograms(registry).labels()
        self.deltas_merged = DELTAS_MERGED.counter(registry)
        self._finished = FINISHED.counter(registry)
        self._histograms = {row: row.histograms(registry) for row in _HISTOGRAMS}
        self._models: dict[tuple[str, str], ModelMetrics] = {}

    def of_model(self, model: str, engine_id: str) -> ModelMetrics:
        """Looked up once for each request, never for each token."""
        key = (model, engine_id)
        if key not in self._models:
            self._models[key] = ModelMetrics(self, self._histograms, self._finished, key)
        return self._models[key]


class ModelMetrics:
    """The series of requests of one model on one engine."""

    def __init__(
        self,
        shared: RequestMetrics,
        histograms: dict[MetricRow, Histograms],
        finished: Counter,
        labels: tuple[str, str],
    ) -> None:
        self.admission = shared.admission
        self.deltas_merged = shared.deltas_merged
        self.finished = {reason: finished.labels(*labels, reason) for reason in FINISHED_REASONS}
        self.prompt_tokens = histograms[PROMPT_TOKENS].labels(*labels)
        self.generation_tokens = histograms[GENERATION_TOKENS].labels(*labels)
        self.max_generation_tokens = histograms[MAX_GENERATION_TOKENS].labels(*labels)
        self.max_tokens = histograms[MAX_TOKENS].labels(*labels)
        self.choices = histograms[CHOICES].labels(*labels)
        self.time_to_first_token = histograms[TTFT].labels(*labels)
        self.inter_token_latency = histograms[ITL].labels(*labels)
        self.time_per_token = histograms[TIME_PER_TOKEN].labels(*labels)
        self.duration = histograms[DURATION].labels(*labels)
