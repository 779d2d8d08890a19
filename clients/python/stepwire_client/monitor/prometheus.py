"""Questions to a Prometheus server, or to one that speaks its HTTP API. One request each, in the caller's thread."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 30.0
DEFAULT_SCRAPE_INTERVAL_S = 15.0
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class PrometheusError(Exception):
    """It can not be reached, or has refused the question; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series over time: (unix seconds, value), finite values only, ascending."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when, in unix seconds, and how far apart the points are."""

    start_s: float
    end_s: float
    step_s: float


class Prometheus:
    """A server at `http://host:port`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def range(self, expr: str, span: Span) -> list[Series]:
        """What the expression gives over the span."""
        data = self._get(
            "query_range", query=expr, start=str(span.start_s), end=str(span.end_s), step=f"{span.step_s:g}"
        )
        return [_series(item["metric"], item["values"]) for item in data["result"]]

    def value(self, expr: str, at_s: float) -> float | None:
        """What the expression gives at a time; the first series of several, None without a finite one."""
        found = self._get("query", query=expr, time=str(at_s))["result"]
        points = _series({}, [found[0]["value"]]).points if found else ()
        return points[0][1] if points else None

    def scrape_interval_s(self) -> float:
        """The longest of stepwire's targets; 15 s where the server has no targets of its own."""
        try:
            targets = self._get("targets", state="active")["activeTargets"]
        except PrometheusError:
            return DEFAULT_SCRAPE_INTERVAL_S
        ours = [parse_duration(target["scrapeInterval"]) for target in targets if "stepwire" in target["scrapePool"]]
        return max(ours, default=DEFAULT_SCRAPE_INTERVAL_S)

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise PrometheusError(
                f"{self._url} refuses {what}: {error.read().decode(errors='replace')[:500]}"
            ) from error
        except (OSError, ValueError) as error:
            raise PrometheusError(f"no Prometheus at {self._url}: {error}") from error
        if not isinstance(answer, dict) or answer.get("status") != "success":
            raise PrometheusError(f"{self._url} does not answer as Prometheus does")
        return answer["data"]


def parse_duration(text: str) -> float:
    """`15m`, `1h30m`, `90s`, `500ms` -> seconds. Raises ValueError."""
    seconds, rest = 0.0, text.strip()
    while rest:
        digits = len(rest) - len(rest.lstrip("0123456789."))
        unit = next((unit for unit in _UNITS_S if rest[digits:].startswith(unit)), "")
        if not digits or not unit:
            raise ValueError(f"{text!r} is no duration like 15m, 1h30m or 90s")
        seconds += float(rest[:digits]) * _UNITS_S[unit]
        rest = rest[digits + len(unit) :]
    if seconds <= 0:
        raise ValueError(f"{text!r} is no duration above 0")
    return seconds


def _series(labels: Mapping[str, str], values: list[tuple[float, str]]) -> Series:
    points = ((float(at), float(value)) for at, value in values)
    return Series(labels, tuple(point for point in points if math.isfinite(point[1])))
