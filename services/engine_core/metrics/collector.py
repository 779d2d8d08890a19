"""All metrics of the engine core. The loop keeps plain integers; text is made in the scrape's own thread."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from engine_core.metrics import engine, requests, scheduler, steps, transport
from engine_core.metrics.engine_view import PREFIX, EngineView
from stepwire.metric_aliases import AliasedRegistry, Collects
from stepwire.metric_rows import histogram
from stepwire.metrics import FAST_BUCKETS
from stepwire.process_metrics import ProcessMetrics, ProcessRows

PROCESS_ROWS = ProcessRows(
    "engine_core",
    histogram(
        f"{PREFIX}interpreter_lag_seconds",
        "How late a thread that waits for the interpreter gets it; looked at every 100 ms.",
        FAST_BUCKETS,
        ("thread",),
    ),
)
_THEMES = (scheduler, requests, steps, transport, engine)
# Every row that may be served.
ROWS = (*(row for theme in _THEMES for row in theme.ROWS), *PROCESS_ROWS.all)


class EngineCollector:
    """Renders the view at each scrape."""

    def __init__(self, view: EngineView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for theme in _THEMES:
            yield from theme.collect(self._view)


def make_registry(view: EngineView, alias: str) -> tuple[Collects, ProcessMetrics]:
    """Everything that an engine core serves; `alias` is the setting."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(view))
    process_metrics = ProcessMetrics(PROCESS_ROWS, registry, ("sampler",))
    return (registry if alias == "none" else AliasedRegistry(registry, ROWS)), process_metrics
