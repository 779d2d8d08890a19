"""Histograms of plain integers, cheap enough for a step loop: an observation is one search and two additions.

Pure. One writer, any number of readers; for several writers there is `shared_histogram.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Traced(NamedTuple):
    """The newest observation of a bucket that has a trace."""

    trace_id: str
    value: float


class Histogram:
    """Counts by bucket; `bounds` are the upper bounds, in order, without infinity."""

    __slots__ = ("bounds", "counts", "total", "traced")

    def __init__(self, bounds: Sequence[float] = ()) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        # Sum of all observations.
        self.total = 0.0
        # By index of the bucket.
        self.traced: dict[int, Traced] = {}

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_traced(self, value: float, trace_id: str) -> None:
        """The same, and the trace becomes the example of its bucket; without one, nothing but the count."""
        if trace_id:
            self.traced[bisect_left(self.bounds, value)] = Traced(trace_id, value)
        self.observe(value)

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Observations up to each bound, the last up to infinity. Copied first: the writer may go on meanwhile."""
        return list(accumulate(list(self.counts)))
