"""The rows of a metric table: name, type, help, labels, buckets, alias. What is not in a table is not served.

Each service declares its rows and gives their values; golden file and documentation are made from the same rows.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric

from stepwire.histogram import Histogram, Traced

Series = tuple[Sequence[str], float]
HistogramSeries = tuple[Sequence[str], Histogram]

_TOTAL = "_total"


class MetricKind(enum.Enum):
    """Types of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric. Names are those on the wire: counters end in _total, the alias too."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    # Upper bounds; histograms only.
    buckets: tuple[float, ...] = ()
    # Second name of the same numbers, with `engine` for `engine_id`.
    alias: str = ""
    # Labels that the alias does not have.
    alias_drops: tuple[str, ...] = ()
    # Series with one of these label values that the alias does not have.
    alias_skips: frozenset[str] = frozenset()

    def family(self, series: Iterable[Series]) -> Metric:
        """A counter or a gauge with these values."""
        kind = CounterMetricFamily if self.kind is MetricKind.COUNTER else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for values, value in series:
            family.add_metric(values, value)
        return family

    def histogram_family(self, series: Iterable[HistogramSeries]) -> Metric:
        """A histogram with these counts."""
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        bounds = [*(str(float(bound)) for bound in self.buckets), "+Inf"]
        for values, histogram in series:
            family.add_metric(values, _buckets(bounds, histogram), histogram.total)
        return family

    def counter(self, registry: CollectorRegistry) -> Counter:
        """A live counter, for what is counted rarely."""
        return Counter(self.name, self.help, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """A live gauge."""
        return Gauge(self.name, self.help, self.labels, registry=registry)

    def histograms(self, registry: CollectorRegistry) -> Histograms:
        """Live histograms by label values."""
        return Histograms(self, registry)

    @property
    def family_name(self) -> str:
        """As the registry knows it."""
        return self.name.removesuffix(_TOTAL) if self.kind is MetricKind.COUNTER else self.name


class Histograms:
    """The histograms of one row; a new label set begins with zeros."""

    def __init__(self, row: MetricRow, registry: CollectorRegistry) -> None:
        self._row = row
        self._series: dict[tuple[str, ...], Histogram] = {}
        if not row.labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Histogram:
        """One histogram: looked up once and kept by whoever observes often."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Histogram(self._row.buckets)
        return found

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        # A copy: the writer may add series meanwhile.
        yield self._row.histogram_family(self._series.copy().items())


def counter(
    name: str,
    help_: str,
    labels: tuple[str, ...] = (),
    alias: str = "",
    *,
    alias_skips: frozenset[str] = frozenset(),
) -> MetricRow:
    """A row that only grows."""
    return MetricRow(name, MetricKind.COUNTER, help_, labels, alias=alias, alias_skips=alias_skips)


def gauge(
    name: str, help_: str, labels: tuple[str, ...] = (), alias: str = "", *, alias_drops: tuple[str, ...] = ()
) -> MetricRow:
    """A row that goes up and down."""
    return MetricRow(name, MetricKind.GAUGE, help_, labels, alias=alias, alias_drops=alias_drops)


def histogram(
    name: str, help_: str, buckets: tuple[float, ...], labels: tuple[str, ...] = (), alias: str = ""
) -> MetricRow:
    """A row of counts by bucket."""
    return MetricRow(name, MetricKind.HISTOGRAM, help_, labels, buckets, alias)


_Bucket = tuple[str, float] | tuple[str, float, Exemplar]


def _buckets(bounds: list[str], found: Histogram) -> list[_Bucket]:
    traced = found.traced.copy()
    return [_bucket(*one, traced.get(index)) for index, one in enumerate(zip(bounds, found.cumulative(), strict=True))]


def _bucket(bound: str, number: int, example: Traced | None) -> _Bucket:
    if example is None:
        return bound, number
    return bound, number, Exemplar({"trace_id": example.trace_id}, example.value)
