"""Rows about engines as this frontend sees them: attached or lost, pings, frames, how requests are spread."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from frontend.engine_client.transport_stats import TransportStats
from stepwire.metric_rows import counter, gauge, histogram
from stepwire.metrics import WIDE_BUCKETS
from stepwire.stream_meter import StreamRows

LIVE_HANDLES = gauge("stepwire_frontend_live_handles", "Handles in the maps of the frontend; 0 when idle.", ("map",))
ENGINE_UP = gauge("stepwire_frontend_engine_up", "1 while the engine is attached and serving.", ("engine_id",))
DEATHS = counter(
    "stepwire_frontend_engine_deaths_total",
    "Engines lost, by how the frontend learned of it.",
    ("engine_id", "kind", "cause"),
)
REFUSALS = counter(
    "stepwire_frontend_engine_refusals_total",
    "Tries to attach an engine that does not fit, by reason; grows as long as it does not.",
    ("reason",),
)
DECISIONS = counter(
    "stepwire_frontend_picker_decisions_total",
    "Requests given to an engine: by its load, to a pinned rank, or because another did not take it.",
    ("reason",),
)
BATCH_GAP = counter(
    "stepwire_frontend_batch_gap_total", "Output batches that never arrived; must stay 0.", ("engine_id",)
)
_PING = histogram(
    "stepwire_frontend_engine_ping_seconds",
    "Round trips of pings, answered by the engine's I/O thread or by its step loop.",
    WIDE_BUCKETS,
    ("engine_id", "through"),
)
_RECONNECTS = counter(
    "stepwire_frontend_engine_reconnects_total",
    "Engines attached again: new_boot = started anew, expired = the same process, with our requests gone.",
    ("engine_id", "result"),
)
_QUEUE_DEPTH = gauge(
    "stepwire_frontend_transport_queue_depth", "Requests and frames waiting to be written to engines.", ("direction",)
)
_STREAM = StreamRows("frontend", ())
ROWS = (
    *(LIVE_HANDLES, ENGINE_UP, DEATHS, REFUSALS, DECISIONS, BATCH_GAP, _PING, _RECONNECTS, _QUEUE_DEPTH),
    *_STREAM.all,
)


class TransportMetrics:
    """Renders the counts of the streams at each scrape."""

    def __init__(self, registry: CollectorRegistry, stats: TransportStats) -> None:
        self._stats = stats
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        # Copies: the loop may add an engine meanwhile.
        yield _PING.histogram_family(self._stats.pings.copy().items())
        yield _RECONNECTS.family(dict(self._stats.reconnects).items())
        yield _QUEUE_DEPTH.family([(("out",), self._stats.num_unsent)])
        yield from self._stats.meter.collect(_STREAM, ())
