"""Metrics of several processes as those of one. No state but what the dead have left; event loop and scrape thread.

Counters and histograms are added up, also those of workers that are gone, so that no rate ever jumps back. Gauges are
those of the living: added up where they count something, and otherwise as the table says. The last exemplar stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar, Sample

# One process's families: [name, help, type, [[series, {label: value}, value, exemplar], …]], as JSON can carry it.
# An exemplar is None or [{label: value}, value].
Snapshot = list[Any]
_Key = tuple[str, tuple[tuple[str, str], ...]]

_CUMULATIVE = ("counter", "histogram")
_RULES: dict[str, Callable[[Iterable[float]], float]] = {
    "stepwire_frontend_build_info": max,
    "stepwire_frontend_config_info": max,
    "python_info": max,
    # An engine is up when every worker reaches it: where one does not, callers are refused.
    "stepwire_frontend_engine_up": min,
    "process_start_time_seconds": min,
    # A limit of each process.
    "process_max_fds": min,
    "stepwire_frontend_tls_certificate_expiry_timestamp_seconds": min,
}
# Engines' own numbers, which each worker repeats; the newest of a counter is the largest.
_MIRRORED = "vllm:"


def take_snapshot(families: Iterable[Metric]) -> Snapshot:
    """What a scrape would say: of a registry, or of the sum of several processes."""
    return [[one.name, one.documentation, one.type, list(map(_parts, one.samples))] for one in families]


def cumulative_part(snapshot: Snapshot) -> Snapshot:
    """What stays true of a process that is gone."""
    return [family for family in snapshot if family[2] in _CUMULATIVE]


def add_up(snapshots: Sequence[Snapshot]) -> list[Metric]:
    """One family for each name, in the order of their first appearance."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[_Key, list[float]]] = {}
    exemplars: dict[_Key, Exemplar] = {}
    for snapshot in snapshots:
        for name, documentation, kind, samples in snapshot:
            families.setdefault(name, Metric(name, documentation, kind))
            of_family = values.setdefault(name, {})
            for series, labels, value, exemplar in samples:
                key = (series, tuple(labels.items()))
                of_family.setdefault(key, []).append(value)
                if exemplar is not None:
                    exemplars[key] = Exemplar(*exemplar)
    for name, family in families.items():
        rule = max if name.startswith(_MIRRORED) else _RULES.get(name, sum)
        for key, found in values[name].items():
            family.add_sample(key[0], dict(key[1]), rule(found), exemplar=exemplars.get(key))
    return list(families.values())


def _parts(sample: Sample) -> list[Any]:
    shown = sample.exemplar
    return [sample.name, sample.labels, sample.value, shown and [shown.labels, shown.value]]
