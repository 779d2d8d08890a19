"""The names under which other tools look for the same numbers: each aliased family is rendered a second time.

An alias has what its row says and `engine` for `engine_id`. It holds no values of its own, so it can not differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import Metric

from stepwire.metric_rows import MetricKind, MetricRow

_RENAMED = {"engine_id": "engine"}


class Collects(Protocol):
    """A registry, or what stands for one at a scrape."""

    def collect(self) -> Iterable[Metric]: ...


class AliasedRegistry:
    """A registry and, behind each family that has one, its alias."""

    def __init__(self, registry: Collects, rows: Iterable[MetricRow]) -> None:
        self._registry = registry
        self._rows = {row.family_name: row for row in rows if row.alias}

    def collect(self) -> Iterator[Metric]:
        """Called for each scrape."""
        for family in self._registry.collect():
            yield family
            row = self._rows.get(family.name)
            if row is not None:
                yield alias_of(family, row)


def alias_of(family: Metric, row: MetricRow) -> Metric:
    """The family under its other name."""
    name = row.alias.removesuffix("_total") if row.kind is MetricKind.COUNTER else row.alias
    alias = Metric(name, family.documentation, family.type)
    start = len(family.name)
    has_same_labels = alias_labels(row) == row.labels
    alias.samples = [
        sample._replace(
            name=name + sample.name[start:],
            labels=sample.labels if has_same_labels else _labels(sample.labels, row),
        )
        for sample in family.samples
        if not row.alias_skips or row.alias_skips.isdisjoint(sample.labels.values())
    ]
    return alias


def alias_labels(row: MetricRow) -> tuple[str, ...]:
    """Names of the labels of a row's alias."""
    return tuple(_RENAMED.get(name, name) for name in row.labels if name not in row.alias_drops)


def _labels(labels: Mapping[str, str], row: MetricRow) -> dict[str, str]:
    return {_RENAMED.get(name, name): value for name, value in labels.items() if name not in row.alias_drops}
