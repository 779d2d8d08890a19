"""A rate that a caller keeps to: a bucket that fills evenly and holds one minute's worth. Owner: the event loop.

It may go into debt: what a request generates is known at its end, and is paid back before the next one. Counters of a
window, which rate limit libraries offer, can only refuse what would go beyond, and then do not count it.
"""

from __future__ import annotations

from collections.abc import Callable

MINUTE_S = 60.0


class RateLimit:
    """So much a minute. `clock` is in seconds."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = per_minute
        self._filled_at = clock()

    def wait_s(self, amount: int) -> float:
        """How long until `amount` may be taken; 0 = now. More than a minute's worth may be when the bucket is full."""
        self._fill()
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def take(self, amount: int) -> None:
        """Count it, whatever is left."""
        self._fill()
        self._level -= amount

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_at) * self.per_minute / MINUTE_S)
        self._filled_at = now
