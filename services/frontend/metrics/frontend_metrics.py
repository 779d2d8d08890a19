"""The frontend's metrics, put together. Never asks the engine.

Owner: the event loop writes, the scrape thread reads. Series exist from the start with value 0; those of a model exist
from the moment an engine of it attaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import grpc
from prometheus_client import CollectorRegistry, disable_created_metrics

from frontend.abort_kind import AbortKind
from frontend.engine_client.balancer import PickReason
from frontend.engine_client.connection_state import REFUSAL_REASONS
from frontend.engine_client.transport_stats import TransportStats
from frontend.engine_client.wire import DEATH_CAUSES
from frontend.metrics import client_classes, engines, mirror, requests, rpcs, text, workers
from frontend.metrics.requests import ModelMetrics, RequestMetrics
from frontend.processing_failures import Stage
from frontend.text_times import TextTimes
from stepwire.metric_aliases import AliasedRegistry, Collects
from stepwire.metric_rows import gauge, histogram
from stepwire.metrics import FAST_BUCKETS
from stepwire.process_metrics import ProcessMetrics, ProcessRows

# How the frontend learns of a death that the engine could not announce.
SILENT_DEATH_KINDS = ("transport", "heartbeat")
UNKNOWN_METHOD = "unknown"

_PROCESS_ROWS = ProcessRows(
    "frontend",
    histogram(
        "stepwire_frontend_event_loop_lag_seconds",
        "How late a timer of the event loop comes; looked at every 100 ms.",
        FAST_BUCKETS,
    ),
)
_CONFIG = gauge(
    "stepwire_frontend_config_info",
    "1, labelled with the limits in force, those of each worker where there are several.",
    ("max_concurrent_requests", "max_concurrent_prompt_tokens", "tokenizer_threads"),
)
_CERTIFICATE_EXPIRY = gauge(
    "stepwire_frontend_tls_certificate_expiry_timestamp_seconds",
    "Unix time at which the certificate of the public ports ends; served with TLS only.",
)
# Every row that may be served.
ROWS = (
    *(*rpcs.ROWS, *client_classes.ROWS, *requests.ROWS, *text.ROWS, *engines.ROWS),
    *(*_PROCESS_ROWS.all, _CONFIG, _CERTIFICATE_EXPIRY, *workers.ROWS),
)


class FrontendMetrics:
    """One registry for one frontend; nothing is global, so that tests can have several."""

    def __init__(self) -> None:
        # The creation time of each series is noise: counters are compared with themselves.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the package leaves it untyped
        self.registry = registry = CollectorRegistry()
        self.process = ProcessMetrics(_PROCESS_ROWS, registry)
        self.text_times = TextTimes()
        text.TextMetrics(registry, self.text_times)
        self.transport = TransportStats()
        engines.TransportMetrics(registry, self.transport)
        self._requests = RequestMetrics(registry)
        self._add_rpcs(registry)
        self._add_engines(registry)
        self._add_requests(registry)

    def _add_rpcs(self, registry: CollectorRegistry) -> None:
        self.rpcs_started = rpcs.STARTED.counter(registry)
        self.rpcs_handled = rpcs.HANDLED.counter(registry)
        self.rpc_duration = rpcs.DURATION.histograms(registry)
        self.rpc_traffic = rpcs.RpcTraffic(registry)
        self.http_requests = rpcs.HTTP_REQUESTS.counter(registry)
        self.http_request_duration = rpcs.HTTP_DURATION.histograms(registry)

    def _add_engines(self, registry: CollectorRegistry) -> None:
        self._live_handles = engines.LIVE_HANDLES.gauge(registry)
        self._engine_up = engines.ENGINE_UP.gauge(registry)
        self._engines: set[str] = set()
        self._engine_deaths = engines.DEATHS.counter(registry)
        self._engine_refusals = engines.REFUSALS.counter(registry)
        for reason in REFUSAL_REASONS:
            self._engine_refusals.labels(reason)
        decisions = engines.DECISIONS.counter(registry)
        self.picks = {reason: decisions.labels(reason.value) for reason in PickReason}
        self._batch_gaps = engines.BATCH_GAP.counter(registry)

    def _add_requests(self, registry: CollectorRegistry) -> None:
        self.client_classes = client_classes.ClientClassMetrics(registry)
        aborted = requests.ABORTED.counter(registry)
        self.requests_aborted = {kind: aborted.labels(kind.value) for kind in AbortKind}
        self.slow_client_cuts = requests.SLOW_CLIENT_CUTS.counter(registry)
        failures = text.PROCESSING_ERRORS.counter(registry)
        self._output_failures = {stage: failures.labels(stage.value) for stage in Stage}

    def served(self, alias: str) -> Collects:
        """What a scrape gets; `alias` is the setting."""
        return self.registry if alias == "none" else AliasedRegistry(self.registry, ROWS)

    def expect_methods(self, methods: Iterable[str]) -> None:
        """Create the series of these RPC methods (`/package.Service/Method`)."""
        for method in (*methods, UNKNOWN_METHOD):
            self.rpcs_started.labels(method)
            for code in grpc.StatusCode:
                self.rpcs_handled.labels(method, code.name)

    def watch_map(self, name: str, size: Callable[[], int]) -> None:
        """Report the size of a map at each scrape."""
        self._live_handles.labels(name).set_function(size)

    def tell_config(self, max_requests: int, max_prompt_tokens: int, tokenizer_threads: int) -> None:
        """The limits of this frontend."""
        _CONFIG.gauge(self.registry).labels(str(max_requests), str(max_prompt_tokens), str(tokenizer_threads)).set(1)

    def watch_gate(self, failures: Callable[[], Mapping[str, int]]) -> None:
        """Report refused credentials by reason."""
        rpcs.AuthFailures(self.registry, failures)

    def mirror_engines(self, connections: Callable[[], Sequence[mirror.Mirrored]]) -> None:
        """Repeat what engines report of themselves."""
        mirror.EngineMirror(self.registry, connections)

    def watch_certificate(self, expiry: Callable[[], float]) -> None:
        """Report the unix time at which it ends."""
        _CERTIFICATE_EXPIRY.gauge(self.registry).set_function(expiry)

    def engine_attached(self, engine_id: str) -> None:
        """Create the series of an engine; a first death that is no change of a series would be seen by no rate."""
        self._batch_gaps.labels(engine_id)
        self.transport.expect(engine_id)
        for kind in SILENT_DEATH_KINDS:
            self._engine_deaths.labels(engine_id, kind, "")
        for cause in DEATH_CAUSES:
            self._engine_deaths.labels(engine_id, "reported", cause)

    def set_engines_up(self, is_up: dict[str, bool]) -> None:
        """Of every engine that ought to be there; the series of the others go, or would alarm for ever."""
        for engine_id in self._engines - is_up.keys():
            self._engine_up.remove(engine_id)
        self._engines = set(is_up)
        for engine_id, value in is_up.items():
            self._engine_up.labels(engine_id).set(value)

    def count_output_failure(self, stage: Stage) -> None:
        self._output_failures[stage].inc()

    def count_engine_refusal(self, reason: str) -> None:
        self._engine_refusals.labels(reason).inc()

    def count_engine_death(self, engine_id: str, kind: str, cause: str) -> None:
        self._engine_deaths.labels(engine_id, kind, cause).inc()

    def count_batch_gap(self, engine_id: str, num_missing: int) -> None:
        """A number that goes back is a gap as well, whatever its size."""
        self._batch_gaps.labels(engine_id).inc(abs(num_missing))

    def of_model(self, model: str, engine_id: str) -> ModelMetrics:
        """The series of a model on an engine; looked up once for each request, never for each token."""
        return self._requests.of_model(model, engine_id)
