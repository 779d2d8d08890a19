"""The page of `stepwire report`: one HTML file that needs nothing else, in light and dark. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from stepwire_client.monitor import axes, chart
from stepwire_client.monitor.boards import BOARDS
from stepwire_client.monitor.chart import Line
from stepwire_client.monitor.panel import Kind, Panel, Unit
from stepwire_client.monitor.prometheus import Span

# In a legend; the chart shows all.
_MAX_NAMES = 12

_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --text: #1c2430; --dim: #667085; --grid: #e4e7ec;
  --c0: #2563eb; --c1: #ea580c; --c2: #16a34a; --c3: #9333ea; --c4: #dc2626; --c5: #0891b2;
  --c6: #ca8a04; --c7: #64748b }
@media (prefers-color-scheme: dark) { :root { --back: #11151c; --card: #1a202a; --text: #e6e9ef; --dim: #98a2b3;
  --grid: #2b3340; --c0: #60a5fa; --c1: #fb923c; --c2: #4ade80; --c3: #c084fc; --c4: #f87171; --c5: #22d3ee;
  --c6: #facc15; --c7: #94a3b8 } }
body { margin: 0 auto; max-width: 1480px; padding: 24px; background: var(--back); color: var(--text);
  font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif }
h1 { font-size: 22px; margin: 0 } h2 { font-size: 18px; margin: 32px 0 4px } h3 { font-size: 14px; margin: 0 }
h2 + p, .when { color: var(--dim); margin: 0 0 12px } h4 { margin: 20px 0 8px; font-size: 13px; color: var(--dim);
  text-transform: uppercase; letter-spacing: .05em }
.tiles, .panels { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)) }
.panels { grid-template-columns: repeat(auto-fill, minmax(400px, 1fr)) }
.tile, .panel { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; padding: 12px }
.tile b { display: block; font-size: 20px } .tile span, .panel p, .legend { color: var(--dim); font-size: 12px }
.panel p { margin: 2px 0 8px } .none { padding: 56px 12px; text-align: center }
.panel svg { width: 100%; display: block }
.legend { margin-top: 6px; line-height: 1.6 } .legend span { margin-right: 12px; white-space: nowrap }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px;
  background: var(--c) }
.l { fill: none; stroke: var(--c); stroke-width: 1.5; stroke-linejoin: round } .a { fill: var(--c); fill-opacity: .55 }
.g { stroke: var(--grid); stroke-width: 1 } .t { fill: var(--dim); font-size: 10px } .e { text-anchor: end }
.m { text-anchor: middle } .h { fill: var(--c0) } table { border-collapse: collapse } td, th { padding: 4px 16px 4px 0;
  text-align: left } th { color: var(--dim); font-weight: normal }
""" + "".join(f".c{place} {{ --c: var(--c{place}) }}\n" for place in range(chart.NUM_COLOURS))


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure of the whole span."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Fired:
    """An alert that fired, and for how long in all."""

    name: str
    severity: str
    labels: str
    duration_s: float


def render(
    source: str, span: Span, tiles: Iterable[Tile], alerts: Sequence[Fired], drawn: dict[Panel, Sequence[Line]]
) -> str:
    """`drawn` has the lines of each panel of all boards; none = it had no data."""
    day, end = time.strftime("%Y-%m-%d", time.localtime(span.start_s)), axes.clock(span.end_s, 0.0)
    when = f"{day} {axes.clock(span.start_s, 0.0)} to {end} {time.strftime('%Z')}, from {source}"
    boards = "".join(
        f"<h2>{escape(board.title.removeprefix('stepwire: ').capitalize())}</h2><p>{escape(board.description)}</p>"
        + "".join(
            f'<h4>{escape(row.title)}</h4><div class="panels">'
            + "".join(_panel(panel, drawn.get(panel, ()), span) for panel in row.panels)
            + "</div>"
            for row in board.rows
        )
        for board in BOARDS
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>stepwire report</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f'<h1>stepwire report</h1><p class="when">{escape(when)}</p>'
        f'<div class="tiles">{"".join(map(_tile, tiles))}</div>{_alerts(alerts)}{boards}</body></html>\n'
    )


def _tile(tile: Tile) -> str:
    return f'<div class="tile"><span>{escape(tile.name)}</span><b>{escape(tile.text)}</b></div>'


def _alerts(alerts: Sequence[Fired]) -> str:
    if not alerts:
        return "<h2>Alerts</h2><p>None fired, or the server does not evaluate deploy/prometheus/rules.yaml.</p>"
    rows = "".join(
        f"<tr><td>{escape(alert.name)}</td><td>{escape(alert.severity)}</td><td>{escape(alert.labels)}</td>"
        f"<td>{axes.text_of(alert.duration_s, Unit.SECONDS)}</td></tr>"
        for alert in alerts
    )
    head = "<tr><th>Alert</th><th>Severity</th><th>Of</th><th>Fired for</th></tr>"
    return f"<h2>Alerts</h2><table>{head}{rows}</table>"


def _panel(panel: Panel, lines: Sequence[Line], span: Span) -> str:
    if lines:
        body = chart.draw(panel, lines, span) + _legend(panel, lines)
    else:
        wanted = f": it takes {panel.event}" if panel.event else ""
        body = f'<div class="none">No data{escape(wanted)}</div>'
    return f'<div class="panel"><h3>{escape(panel.title)}</h3><p>{escape(panel.description)}</p>{body}</div>'


def _legend(panel: Panel, lines: Sequence[Line]) -> str:
    """Names with the largest value; a heat map has its names at the axis, and states have none."""
    if panel.kind is Kind.HEATMAP:
        return ""
    names = "".join(
        f'<span class="c{place % chart.NUM_COLOURS}"><i></i>{escape(line.name)}{_largest(panel, line)}</span>'
        for place, line in enumerate(lines[:_MAX_NAMES])
    )
    more = f"<span>and {len(lines) - _MAX_NAMES} more</span>" if len(lines) > _MAX_NAMES else ""
    return f'<div class="legend">{names}{more}</div>'


def _largest(panel: Panel, line: Line) -> str:
    if panel.kind is Kind.STATES:
        return ""
    return escape(f" (max {axes.text_of(max(value for _, value in line.points), panel.unit)})")
