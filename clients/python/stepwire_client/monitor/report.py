"""Collects what a report shows: every panel's series, figures of the whole span, and alerts that fired."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepwire_client.monitor import axes, report_page
from stepwire_client.monitor.boards import BOARDS
from stepwire_client.monitor.chart import Line
from stepwire_client.monitor.panel import Kind, Panel, Unit
from stepwire_client.monitor.prometheus import Prometheus, Series, Span
from stepwire_client.monitor.promql import WINDOW
from stepwire_client.monitor.report_page import Fired, Tile

_F, _E = "stepwire_frontend_", "stepwire_engine_core_"
# A rate needs two samples; four survive a failed scrape.
_SCRAPES_OF_A_WINDOW = 4
_LABELS_OF_ALERTS = frozenset({"__name__", "alertname", "alertstate", "severity", "job"})


@dataclass(frozen=True, slots=True)
class Choice:
    """Regular expressions for what is to be seen; `.*` = all."""

    model: str = ".*"
    engine: str = ".*"
    frontend: str = ".*"


def substitute(expr: str, choice: Choice, window_s: float) -> str:
    """The expression without Grafana's variables."""
    values = {"$model": choice.model, "$engine": choice.engine, "$frontend": choice.frontend}
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr.replace(WINDOW, f"{max(1, round(window_s))}s")


def window_s(scrape_interval_s: float, step_s: float) -> float:
    """The window of a rate: long enough for the scrapes, and without holes between the points."""
    return max(_SCRAPES_OF_A_WINDOW * scrape_interval_s, step_s)


def collect(server: Prometheus, source: str, span: Span, choice: Choice, tick: Callable[[], None]) -> str:
    """The finished page; `tick` is called after each panel. Raises PrometheusError."""
    window = window_s(server.scrape_interval_s(), span.step_s)
    drawn: dict[Panel, Sequence[Line]] = {}
    for board in BOARDS:
        for panel in board.panels():
            drawn[panel] = panel_lines(server, panel, span, choice, window)
            tick()
    return report_page.render(source, span, _tiles(server, span, choice), _alerts(server, span), drawn)


def panel_lines(server: Prometheus, panel: Panel, span: Span, choice: Choice, window: float) -> list[Line]:
    """The panel's series that have a finite point; of a heat map all or none."""
    lines = [
        Line(name_of(query.legend, series), series.points)
        for query in panel.queries
        for series in server.range(substitute(query.expr, choice, window), span)
        if series.points
    ]
    if panel.kind is Kind.HEATMAP and not any(value for line in lines for _, value in line.points):
        return []
    return lines


def name_of(legend: str, series: Series) -> str:
    """`{{label}}` replaced by the label's value."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: series.labels.get(found[1], ""), legend).strip()


def _tiles(server: Prometheus, span: Span, choice: Choice) -> list[Tile]:
    """A figure that there is none of is left out: a span without requests has no latency."""
    length = f"{round(span.end_s - span.start_s)}s"
    served = 'model_name=~"$model",engine_id=~"$engine",instance=~"$frontend"'
    engine = 'model_name=~"$model",engine_id=~"$engine"'

    def quantile(q: float, name: str) -> str:
        return f"histogram_quantile({q}, sum by (le) (increase({_F}{name}_bucket{{{served}}}[{length}])))"

    wanted = (
        ("Choices finished", f"sum(increase({_F}requests_finished_total{{{served}}}[{length}]))", Unit.COUNT),
        ("Prompt tokens", f"sum(increase({_E}prompt_tokens_total{{{engine}}}[{length}]))", Unit.COUNT),
        ("Generated tokens", f"sum(increase({_E}generation_tokens_total{{{engine}}}[{length}]))", Unit.COUNT),
        ("TTFT p50", quantile(0.5, "time_to_first_token_seconds"), Unit.SECONDS),
        ("TTFT p99", quantile(0.99, "time_to_first_token_seconds"), Unit.SECONDS),
        ("ITL p50", quantile(0.5, "inter_token_latency_seconds"), Unit.SECONDS),
        ("ITL p99", quantile(0.99, "inter_token_latency_seconds"), Unit.SECONDS),
        ("Highest KV usage", f"max(max_over_time({_E}kv_cache_usage_ratio{{{engine}}}[{length}]))", Unit.RATIO),
        ("Preemptions", f"sum(increase({_E}preemptions_total{{{engine}}}[{length}]))", Unit.COUNT),
    )
    found = ((name, server.value(substitute(expr, choice, 1.0), span.end_s), unit) for name, expr, unit in wanted)
    return [Tile(name, _whole(value, unit)) for name, value, unit in found if value is not None]


def _whole(value: float, unit: Unit) -> str:
    # increase() extrapolates to the ends of the span.
    return axes.text_of(round(value) if unit is Unit.COUNT else value, unit)


def _alerts(server: Prometheus, span: Span) -> list[Fired]:
    found = server.range('ALERTS{alertname=~"Stepwire.*",alertstate="firing"}', span)
    fired = [
        Fired(
            series.labels["alertname"],
            series.labels.get("severity", ""),
            ", ".join(f"{name} {value}" for name, value in series.labels.items() if name not in _LABELS_OF_ALERTS),
            len(series.points) * span.step_s,
        )
        for series in found
    ]
    return sorted(fired, key=lambda alert: (alert.severity, alert.name, alert.labels))
