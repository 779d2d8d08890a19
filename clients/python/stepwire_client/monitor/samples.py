"""What a process says at its metrics endpoint, and what has changed between two looks at it. Does one HTTP request."""

from __future__ import annotations

import math
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = dict[str, str]
Samples = dict[str, list[tuple[Labels, float]]]

TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Look:
    """All series of one process at one time; seconds of the monotonic clock."""

    at_s: float
    samples: Samples

    def has(self, name: str) -> bool:
        """Whether the process serves this series at all."""
        return name in self.samples

    def value(self, name: str, **labels: str) -> float:
        """Sum over the series with these labels; 0 without any."""
        return sum(value for found, value in self.samples.get(name, ()) if _fits(found, labels))

    def label(self, name: str, label: str) -> str:
        """Value of a label in the first series, of those that are not 0 if there are such; empty without any."""
        found = self.samples.get(name, [])
        return next((labels.get(label, "") for labels, value in [*(pair for pair in found if pair[1]), *found]), "")

    def buckets(self, name: str, labels: Labels) -> dict[float, float]:
        """Upper bound -> observations up to it, of a histogram."""
        counts: dict[float, float] = defaultdict(float)
        for found, value in self.samples.get(f"{name}_bucket", ()):
            if _fits(found, labels):
                counts[float(found["le"])] += value
        return counts


@dataclass(frozen=True, slots=True)
class Change:
    """From one look to the next; `before` is None at the first."""

    before: Look | None
    now: Look

    def rate(self, name: str, **labels: str) -> float | None:
        """Growth of a counter a second; None without an earlier look."""
        if self.before is None:
            return None
        duration_s = self.now.at_s - self.before.at_s
        return _growth(self.before.value(name, **labels), self.now.value(name, **labels)) / max(duration_s, 1e-9)

    def ratio(self, part: str, whole: str) -> float | None:
        """Growth of one counter over that of another; None while the latter stands still."""
        of_whole = self.rate(whole)
        return None if not of_whole else (self.rate(part) or 0.0) / of_whole

    def quantile(self, q: float, name: str, **labels: str) -> float | None:
        """Of what a histogram observed in between, linear within a bucket; None when that is nothing."""
        before = self.before.buckets(name, labels) if self.before else {}
        counts = [
            (bound, _growth(before.get(bound, 0.0), count))
            for bound, count in sorted(self.now.buckets(name, labels).items())
        ]
        return _quantile(q, counts) if self.before else None


def look(endpoint: str) -> Look:
    """Ask `host:port` or a URL for its metrics. Raises OSError or ValueError."""
    url = endpoint if "://" in endpoint else f"http://{endpoint}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    return Look(time.monotonic(), parse(text))


def parse(text: str) -> Samples:
    """Prometheus' text format. Raises ValueError."""
    samples: Samples = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name].append((sample.labels, sample.value))
    return dict(samples)


def _fits(found: Labels, wanted: Labels) -> bool:
    return all(found.get(name) == value for name, value in wanted.items())


def _growth(before: float, now: float) -> float:
    # A process that was started again counts from 0.
    return now - before if now >= before else now


def _quantile(q: float, counts: list[tuple[float, float]]) -> float | None:
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = q * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low
