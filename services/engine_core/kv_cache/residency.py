"""How long KV blocks keep their content, and how long until they are used again, for a sample of the blocks.

Answers whether a larger cache would pay. Which blocks are sampled depends on the order of allocations alone, and the
time is what the caller has set: same calls, same numbers. Owner: the busy-loop thread; a scrape may read the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepwire.histogram import Histogram

# Upper bounds in seconds; one more count is for what is longer.
RESIDENCY_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
)  # fmt: skip

# Multiples of the golden ratio spread evenly over the range whatever the rate: no period that requests could share.
_GOLDEN = 2654435769
_RANGE = 2**32


@dataclass(slots=True)
class _Stay:
    """One content in a sampled block, from being handed out to eviction."""

    begin: float
    last_use: float


class BlockResidency:
    """Told by the pool of every allocation, hit and eviction."""

    def __init__(self, sample: float) -> None:
        # Set by the owner of the clock before each step.
        self.now = 0.0
        self.lifetimes = Histogram(RESIDENCY_BUCKETS)
        self.idle_before_evict = Histogram(RESIDENCY_BUCKETS)
        self.reuse_gaps = Histogram(RESIDENCY_BUCKETS)
        self._threshold = int(sample * _RANGE)
        self._num_allocated = 0
        self._stays: dict[int, _Stay] = {}

    def allocated(self, block_id: int) -> None:
        """A block was handed out empty. A former stay that was not evicted (no full block, or a reset) is dropped."""
        self._num_allocated += 1
        if self._num_allocated * _GOLDEN % _RANGE < self._threshold:
            self._stays[block_id] = _Stay(self.now, self.now)
        else:
            self._stays.pop(block_id, None)

    def hit(self, block_id: int) -> None:
        stay = self._stays.get(block_id)
        if stay is not None:
            self.reuse_gaps.observe(self.now - stay.last_use)
            stay.last_use = self.now

    def evicted(self, block_id: int) -> None:
        stay = self._stays.pop(block_id, None)
        if stay is not None:
            self.lifetimes.observe(self.now - stay.begin)
            self.idle_before_evict.observe(self.now - stay.last_use)
