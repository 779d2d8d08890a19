"""The frontend's metrics: every name, type, help text, label set and bucket list in one place. Never asks the engine.

Owner: the event loop writes, the scrape thread reads. Series exist from the start with value 0; those of a model exist
from the moment an engine of it attaches.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable

import google.protobuf
import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from frontend.abort_kind import AbortKind
from frontend.engine_client.balancer import PickReason
from frontend.engine_client.connection_state import REFUSAL_REASONS
from stepwire import __version__
from stepwire.grpc_errors import REASONS
from stepwire.metrics import COUNT_BUCKETS, ITL_BUCKETS, REQUEST_LATENCY_BUCKETS, TOKEN_COUNT_BUCKETS, TTFT_BUCKETS

# The engines know the classes, and a name that only a caller knows is no label: here all are one.
CLIENT_CLASS = "default"
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition", "rejected")
DEATH_KINDS = ("reported", "transport", "heartbeat")
UNKNOWN_METHOD = "unknown"

_MODEL_LABELS = ("model_name", "engine_id")


class FrontendMetrics:
    """One registry for one frontend; nothing is global, so that tests can have several."""

    def __init__(self) -> None:
        # The creation time of each series is noise: counters are compared with themselves.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the package leaves it untyped
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self._declare_process(registry)
        self._declare_engines(registry)
        self._declare_requests(registry)
        self._models: dict[tuple[str, str], ModelMetrics] = {}

    def _declare_process(self, registry: CollectorRegistry) -> None:
        build_info = Gauge(
            "stepwire_frontend_build_info",
            "1, labelled with versions.",
            ("version", "python", "grpc", "protobuf"),
            registry=registry,
        )
        build_info.labels(__version__, platform.python_version(), grpc.__version__, google.protobuf.__version__).set(1)
        self.rpcs_started = Counter(
            "stepwire_frontend_rpcs_started", "RPCs begun, health included.", ("grpc_method",), registry=registry
        )
        self.rpcs_handled = Counter(
            "stepwire_frontend_rpcs_handled",
            "RPCs ended, by status code.",
            ("grpc_method", "grpc_code"),
            registry=registry,
        )
        self.http_requests = Counter(
            "stepwire_frontend_http_requests",
            "HTTP requests ended, by status; 499 = the client went away before an answer.",
            ("method", "status", "handler"),
            registry=registry,
        )
        self.http_request_duration = Histogram(
            "stepwire_frontend_http_request_duration_seconds",
            "From an HTTP request's headers to the end of its answer.",
            ("method", "handler"),
            buckets=REQUEST_LATENCY_BUCKETS,
            registry=registry,
        )
        self._live_handles = Gauge(
            "stepwire_frontend_live_handles",
            "Handles in the maps of the frontend; 0 when idle.",
            ("map",),
            registry=registry,
        )

    def _declare_engines(self, registry: CollectorRegistry) -> None:
        self._engine_up = Gauge(
            "stepwire_frontend_engine_up",
            "1 while the engine is attached and serving.",
            ("engine_id",),
            registry=registry,
        )
        self._engines: set[str] = set()
        self._engine_deaths = Counter(
            "stepwire_frontend_engine_deaths",
            "Engines lost, by how the frontend learned of it.",
            ("engine_id", "kind", "cause"),
            registry=registry,
        )
        self._engine_refusals = Counter(
            "stepwire_frontend_engine_refusals",
            "Tries to attach an engine that does not fit, by reason; grows as long as it does not.",
            ("reason",),
            registry=registry,
        )
        for reason in REFUSAL_REASONS:
            self._engine_refusals.labels(reason)
        decisions = Counter(
            "stepwire_frontend_picker_decisions",
            "Requests given to an engine: by its load, to a pinned rank, or because another did not take it.",
            ("reason",),
            registry=registry,
        )
        self.picks = {reason: decisions.labels(reason.value) for reason in PickReason}
        self._batch_gaps = Counter(
            "stepwire_frontend_batch_gap",
            "Output batches that never arrived; must stay 0.",
            ("engine_id",),
            registry=registry,
        )

    def _declare_requests(self, registry: CollectorRegistry) -> None:
        in_flight = Gauge(
            "stepwire_frontend_requests_in_flight", "Requests being served.", ("client_class",), registry=registry
        )
        self.requests_in_flight = in_flight.labels(CLIENT_CLASS)
        rejected = Counter(
            "stepwire_frontend_requests_rejected",
            "Requests refused before they generated anything, by reason.",
            ("reason", "client_class"),
            registry=registry,
        )
        self.requests_rejected = {reason: rejected.labels(reason, CLIENT_CLASS) for reason in REASONS}
        aborted = Counter(
            "stepwire_frontend_requests_aborted",
            "Choices aborted in the engine, by reason.",
            ("reason",),
            registry=registry,
        )
        self.requests_aborted = {kind: aborted.labels(kind.value) for kind in AbortKind}
        self.slow_client_cuts = Counter(
            "stepwire_frontend_slow_client_cuts", "Streams cut because nobody read them.", registry=registry
        )
        failures = Counter(
            "stepwire_frontend_output_processing_errors",
            "Requests whose output could not be processed; each fails alone.",
            ("stage",),
            registry=registry,
        )
        self.output_processing_errors = failures.labels("detokenize")
        self._finished = Counter(
            "stepwire_frontend_requests_finished",
            "Choices ended, each exactly once.",
            (*_MODEL_LABELS, "finished_reason"),
            registry=registry,
        )
        self._histograms = {name: _histogram(name, help_, buckets, registry) for name, help_, buckets in _HISTOGRAMS}

    def expect_methods(self, methods: Iterable[str]) -> None:
        """Create the series of these RPC methods (`/package.Service/Method`)."""
        for method in (*methods, UNKNOWN_METHOD):
            self.rpcs_started.labels(method)
            for code in grpc.StatusCode:
                self.rpcs_handled.labels(method, code.name)

    def watch_map(self, name: str, size: Callable[[], int]) -> None:
        """Report the size of a map at each scrape."""
        self._live_handles.labels(name).set_function(size)

    def engine_attached(self, engine_id: str) -> None:
        """Create the series of an engine."""
        self._batch_gaps.labels(engine_id)
        for kind in DEATH_KINDS:
            self._engine_deaths.labels(engine_id, kind, "")

    def set_engines_up(self, is_up: dict[str, bool]) -> None:
        """Of every engine that ought to be there; the series of the others go, or would alarm for ever."""
        for engine_id in self._engines - is_up.keys():
            self._engine_up.remove(engine_id)
        self._engines = set(is_up)
        for engine_id, value in is_up.items():
            self._engine_up.labels(engine_id).set(value)

    def count_engine_refusal(self, reason: str) -> None:
        self._engine_refusals.labels(reason).inc()

    def count_engine_death(self, engine_id: str, kind: str, cause: str) -> None:
        self._engine_deaths.labels(engine_id, kind, cause).inc()

    def count_batch_gap(self, engine_id: str, num_missing: int) -> None:
        """A number that goes back is a gap as well, whatever its size."""
        self._batch_gaps.labels(engine_id).inc(abs(num_missing))

    def of_model(self, model: str, engine_id: str) -> ModelMetrics:
        """The series of a model on an engine; looked up once for each request, never for each token."""
        key = (model, engine_id)
        if key not in self._models:
            self._models[key] = ModelMetrics(self._histograms, self._finished, key)
        return self._models[key]


class ModelMetrics:
    """The series of requests of one model on one engine."""

    def __init__(self, histograms: dict[str, Histogram], finished: Counter, labels: tuple[str, str]) -> None:
        self.finished = {reason: finished.labels(*labels, reason) for reason in FINISHED_REASONS}
        self.prompt_tokens = histograms["request_prompt_tokens"].labels(*labels)
        self.generation_tokens = histograms["request_generation_tokens"].labels(*labels)
        self.max_generation_tokens = histograms["request_max_generation_tokens"].labels(*labels)
        self.choices = histograms["request_choices"].labels(*labels)
        self.time_to_first_token = histograms["time_to_first_token_seconds"].labels(*labels)
        self.inter_token_latency = histograms["inter_token_latency_seconds"].labels(*labels)
        self.duration = histograms["request_duration_seconds"].labels(*labels)


_HISTOGRAMS = (
    ("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_COUNT_BUCKETS),
    ("request_generation_tokens", "Output tokens of a request, over its choices.", TOKEN_COUNT_BUCKETS),
    ("request_max_generation_tokens", "Output tokens of the longest choice of a request.", TOKEN_COUNT_BUCKETS),
    ("request_choices", "Choices of a request.", COUNT_BUCKETS),
    ("time_to_first_token_seconds", "Arrival to first token, frontend clock.", TTFT_BUCKETS),
    ("inter_token_latency_seconds", "Token batch to next token batch of one choice.", ITL_BUCKETS),
    ("request_duration_seconds", "Arrival to the end of the answer.", REQUEST_LATENCY_BUCKETS),
)


def _histogram(name: str, help_: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"stepwire_frontend_{name}", help_, _MODEL_LABELS, buckets=buckets, registry=registry)
