"""One panel as SVG: lines, stacked areas, a heat map or bars of states. Pure; colours come from the page's CSS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from stepwire_client.monitor import axes
from stepwire_client.monitor.panel import Kind, Panel, Unit
from stepwire_client.monitor.prometheus import Span

WIDTH, HEIGHT = 460, 210
LEFT, RIGHT, TOP, BOTTOM = 66, 8, 8, 24
# The page defines so many; more series repeat them.
NUM_COLOURS = 8
_INNER_WIDTH, _INNER_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
_MAX_LABELS = 12

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One series with its name."""

    name: str
    points: Points


def draw(panel: Panel, lines: Sequence[Line], span: Span) -> str:
    """The chart; `lines` is not empty, and no line of it is. Of a heat map the names are upper bounds."""
    draw_kind = {Kind.HEATMAP: _heatmap, Kind.STATES: _states, Kind.STACKED: _stacked, Kind.LINES: _lines}
    body = draw_kind[panel.kind](panel, lines, span)
    label = escape(panel.title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{_time_axis(span)}{body}</svg>'


def _lines(panel: Panel, lines: Sequence[Line], span: Span) -> str:
    top = max(value for line in lines for _, value in line.points)
    ticks = axes.unit_ticks(top, panel.unit)
    drawn = "".join(
        f'<polyline class="l c{place % NUM_COLOURS}" points="{_path(piece, span, ticks[-1])}"/>'
        for place, line in enumerate(lines)
        for piece in _pieces(line.points, span)
    )
    return _value_axis(ticks, panel.unit) + drawn


def _stacked(panel: Panel, lines: Sequence[Line], span: Span) -> str:
    floor: dict[float, float] = {}
    areas = []
    for line in lines:
        below = {at: floor.get(at, 0.0) for at, _ in line.points}
        floor.update({at: below[at] + value for at, value in line.points})
        areas.append((below, {at: floor[at] for at, _ in line.points}))
    ticks = axes.unit_ticks(max(floor.values()), panel.unit)
    drawn = ""
    for place, (below, above) in enumerate(areas):
        for piece in _pieces(list(above.items()), span):
            back = [(at, below[at]) for at, _ in reversed(piece)]
            drawn += f'<polygon class="a c{place % NUM_COLOURS}" points="{_path([*piece, *back], span, ticks[-1])}"/>'
    return _value_axis(ticks, panel.unit) + drawn


def _heatmap(panel: Panel, lines: Sequence[Line], span: Span) -> str:
    bands = _bands(lines)
    largest = max((count for _, counts in bands for count in counts.values()), default=0.0)
    height = _INNER_HEIGHT / max(1, len(bands))
    every = -(-len(bands) // _MAX_LABELS)
    width = max(1.0, _INNER_WIDTH * span.step_s / (span.end_s - span.start_s))
    drawn = ""
    for place, (bound, counts) in enumerate(bands):
        y = HEIGHT - BOTTOM - (place + 1) * height
        # The description says what is counted: there is no room for the word.
        unit = Unit.COUNT if panel.unit is Unit.TOKENS else panel.unit
        name = f"≤ {axes.text_of(bound, unit)}" if bound < float("inf") else "more"
        if place % every == 0:
            drawn += f'<text class="t e" x="{LEFT - 6}" y="{y + height / 2 + 3:.1f}">{escape(name)}</text>'
        drawn += "".join(
            f'<rect class="h" x="{_x(at, span):.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'opacity="{0.12 + 0.88 * (count / largest) ** 0.5:.2f}"/>'
            for at, count in counts.items()
            if count > 0
        )
    return drawn


def _bands(lines: Sequence[Line]) -> list[tuple[float, dict[float, float]]]:
    """(upper bound, time -> observations of this bucket alone), of the buckets around those that have any."""
    below: dict[float, float] = {}
    bands = []
    for line in sorted(lines, key=lambda line: float(line.name)):
        counts = dict(line.points)
        bands.append((float(line.name), {at: max(0.0, count - below.get(at, 0.0)) for at, count in counts.items()}))
        below = counts
    used = [place for place, (_, counts) in enumerate(bands) if any(count > 0 for count in counts.values())]
    return bands[used[0] : used[-1] + 1] if used else bands[:1]


def _states(panel: Panel, lines: Sequence[Line], span: Span) -> str:
    height = min(28.0, _INNER_HEIGHT / len(lines))
    drawn = ""
    for place, line in enumerate(lines):
        y = TOP + place * height
        for piece in _pieces(line.points, span):
            x, end = _x(piece[0][0], span), _x(piece[-1][0], span)
            drawn += (
                f'<rect class="a c{place % NUM_COLOURS}" x="{x:.1f}" y="{y + 2:.1f}" width="{max(2.0, end - x):.1f}" '
                f'height="{height - 4:.1f}"/>'
            )
    return drawn


def _pieces(points: Points, span: Span) -> list[Points]:
    """Cut where points are missing, so that no line is drawn through what nobody has measured."""
    cuts = [place for place in range(1, len(points)) if points[place][0] - points[place - 1][0] > span.step_s * 1.5]
    return [points[start:end] for start, end in zip([0, *cuts], [*cuts, len(points)], strict=True)]


def _path(points: Points, span: Span, top: float) -> str:
    # A point of its own is drawn as a short line.
    shown = [*points, (points[0][0] + span.step_s / 4, points[0][1])] if len(points) == 1 else points
    return " ".join(f"{_x(at, span):.1f},{_y(value, top):.1f}" for at, value in shown)


def _x(at_s: float, span: Span) -> float:
    return LEFT + _INNER_WIDTH * (at_s - span.start_s) / (span.end_s - span.start_s)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - _INNER_HEIGHT * max(0.0, value) / top


def _value_axis(ticks: Sequence[float], unit: Unit) -> str:
    drawn = ""
    for tick in ticks:
        y, text = _y(tick, ticks[-1]), escape(axes.text_of(tick, unit))
        drawn += f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        drawn += f'<text class="t e" x="{LEFT - 6}" y="{y + 3:.1f}">{text}</text>'
    return drawn


def _time_axis(span: Span) -> str:
    length_s = span.end_s - span.start_s
    # A label in the corner would be cut off.
    ticks = [at for at in axes.time_ticks(span.start_s, span.end_s) if 0.04 < (at - span.start_s) / length_s < 0.96]
    return "".join(
        f'<line class="g" x1="{_x(at, span):.1f}" x2="{_x(at, span):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="t m" x="{_x(at, span):.1f}" y="{HEIGHT - 8}">{axes.clock(at, length_s)}</text>'
        for at in ticks
    )
