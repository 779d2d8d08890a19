"""What is shown of a server's metrics, whoever draws it: Grafana (deploy/grafana) or `stepwire report`. Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Unit(Enum):
    """Units of panels, by their names in Grafana."""

    SECONDS = "s"
    RATIO = "percentunit"
    COUNT = "short"
    TOKENS = "tokens"
    PER_SECOND = "ops"
    TOKENS_PER_SECOND = "tok/s"
    BYTES = "bytes"
    BYTES_PER_SECOND = "Bps"


class Kind(Enum):
    """How the series of a panel are drawn."""

    LINES = "lines"
    STACKED = "stacked"
    # The buckets of one histogram: how many observations fell into each, over time.
    HEATMAP = "heatmap"
    # Series that are 1 while what their legend names holds.
    STATES = "states"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, with the variables of `promql`, and the name of each series it gives."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `event` says what must happen before there is anything to see; empty = load is enough."""

    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    event: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that answer one question."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; `uid` is also its file's name."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        """All panels in reading order."""
        for row in self.rows:
            yield from row.panels
