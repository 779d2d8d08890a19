"""Scales and numbers of charts: round ticks, and values as people write them. Pure."""

from __future__ import annotations

import math
import time

from stepwire_client.monitor.panel import Unit

_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_SUFFIXES = {
    Unit.PER_SECOND: "/s",
    Unit.TOKENS: " tokens",
    Unit.TOKENS_PER_SECOND: " tok/s",
    Unit.BYTES: "B",
    Unit.BYTES_PER_SECOND: "B/s",
}


def round_ticks(top: float, count: int = 4) -> list[float]:
    """From 0 to at least `top`, some `count` of them, at steps of 1, 2 or 5 times a power of ten."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    return [step * place for place in range(math.ceil(top / step - 1e-9) + 1)]


def unit_ticks(top: float, unit: Unit) -> list[float]:
    """The same, and for bytes round in KiB, MiB or GiB."""
    if unit not in {Unit.BYTES, Unit.BYTES_PER_SECOND} or top < 1:
        return round_ticks(top)
    size = 1024.0 ** int(math.log(top, 1024))
    return [tick * size for tick in round_ticks(top / size)]


def time_ticks(start_s: float, end_s: float, count: int = 5) -> list[float]:
    """Round moments between two times, by the local clock."""
    step = next((step for step in _TIME_STEPS_S if step >= (end_s - start_s) / count), _TIME_STEPS_S[-1])
    offset = time.localtime(start_s).tm_gmtoff
    first = math.ceil((start_s + offset) / step) * step - offset
    return [float(first + step * place) for place in range(int((end_s - first) // step) + 1)]


def clock(at_s: float, span_s: float) -> str:
    """Local time, with seconds where the span is short, with the day where it is long."""
    form = "%H:%M:%S" if span_s < 600 else "%H:%M" if span_s < 86400 else "%d %b %H:%M"
    return time.strftime(form, time.localtime(at_s))


def text_of(value: float, unit: Unit) -> str:
    """A value with its unit: 12 ms, 1.5 MiB/s, 85 %."""
    if unit is Unit.SECONDS:
        return _seconds(value)
    if unit is Unit.RATIO:
        return f"{value * 100:.3g} %"
    if unit in {Unit.BYTES, Unit.BYTES_PER_SECOND}:
        return _scaled(value, 1024.0, ("", "Ki", "Mi", "Gi", "Ti")) + _SUFFIXES[unit]
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T")).rstrip() + _SUFFIXES.get(unit, "")


def _seconds(value: float) -> str:
    size = abs(value)
    if 0 < size < 0.001:
        return f"{value * 1e6:.3g} µs"
    if 0 < size < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if size < 600 else f"{value / 60:.3g} min" if size < 36000 else f"{value / 3600:.3g} h"


def _scaled(value: float, base: float, names: tuple[str, ...]) -> str:
    place = 0
    while abs(value) >= base and place < len(names) - 1:
        value /= base
        place += 1
    # Of three digits, without an exponent.
    return f"{value:.0f} {names[place]}" if abs(value) >= 100 else f"{value:.3g} {names[place]}"
