"""What a scraper finds at a process's /metrics, read with Prometheus's own parsers."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from stepwire.metric_aliases import alias_labels
from stepwire.metric_rows import MetricKind, MetricRow

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
# Of the standard collectors.
_STANDARD = ("process_", "python_")
# Rows that need a setting: samples of the KV cache's blocks, a look for NaN, costs of steps, TLS, several workers.
_OPTIONAL = (
    "stepwire_engine_core_kv_block_",
    "stepwire_engine_core_corrupted_requests",
    "stepwire_engine_core_estimated_",
    "stepwire_frontend_tls_certificate_expiry_timestamp_seconds",
    "stepwire_frontend_worker",
)


class Scrape:
    """One scrape of one process."""

    def __init__(self, port: int, accept: str = "text/plain") -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request) as response:
            text = response.read().decode()
        parse = parse_openmetrics if accept == OPENMETRICS else parse_text
        self.families: dict[str, Metric] = {family.name: family for family in parse(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    @property
    def counters(self) -> dict[tuple[str, ...], float]:
        """Everything that may never go down, by name and labels; those of the process's own collectors too."""
        growing = [family for family in self.families.values() if family.type in ("counter", "histogram")]
        return {
            (one.name, *sorted(map(str, one.labels.items()))): one.value for family in growing for one in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        """Sum of a series over the labels that are not given; there must be one at least."""
        found = [one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items()]
        assert found, f"no series {name} {labels}"
        return sum(found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label, without those that are 0."""
        found: dict[str, float] = {}
        for one in self.samples:
            if one.name == name and one.value:
                found[one.labels[label]] = found.get(one.labels[label], 0) + one.value
        return found

    def check_against(self, rows: Sequence[MetricRow]) -> None:
        """What is served is what is declared, as it is declared; every alias has the values of its row."""
        declared = {row.family_name: row for row in rows}
        missing = [name for name in declared.keys() - self.families.keys() if not name.startswith(_OPTIONAL)]
        assert not missing, missing
        aliases = {_alias_family(row): row for row in rows if row.alias}
        for name, family in self.families.items():
            if name.startswith(_STANDARD):
                continue
            row = declared.get(name) or aliases[name]
            assert family.type == row.kind.value, name
            labels = row.labels if name in declared else alias_labels(row)
            for sample in family.samples:
                assert set(sample.labels) - {"le"} == set(labels), sample
        for name, row in aliases.items():
            self._check_alias(name, row)

    def _check_alias(self, name: str, row: MetricRow) -> None:
        own = self.families.get(row.family_name)
        assert (own is None) == (name not in self.families), name
        if own is None:
            return
        shown = [sample.value for sample in own.samples if not row.alias_skips & set(sample.labels.values())]
        assert [sample.value for sample in self.families[name].samples] == shown


class Totals(Protocol):
    """Where sums over processes come from: their own endpoints, or a Prometheus."""

    def total(self, name: str, **labels: str) -> float:
        """Sum of a series over the labels that are not given."""
        ...

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label, without those that are 0."""
        ...


class Scrapes:
    """One scrape of each process; what the dead have counted is gone."""

    def __init__(self, ports: Iterable[int]) -> None:
        self.all = [Scrape(port) for port in ports]

    def total(self, name: str, **labels: str) -> float:
        return sum(scrape.total(name, **labels) for scrape in self.all)

    def by(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for scrape in self.all:
            for value, number in scrape.by(name, label).items():
                found[value] = found.get(value, 0) + number
        return found


def _alias_family(row: MetricRow) -> str:
    return row.alias.removesuffix("_total") if row.kind is MetricKind.COUNTER else row.alias
