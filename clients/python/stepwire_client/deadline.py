"""One point in time by which several calls have to be done. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at_s` is on the scale of `clock`, in seconds; None = there is no limit.

    deadline = Deadline.after(30)
    ids = client.tokenize(["..."], timeout_s=deadline.remaining())
    answer = client.generate(request, timeout_s=deadline.remaining())
    """

    at_s: float | None
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """So many seconds from now; None = never."""
        return cls(None if seconds is None else clock() + seconds, clock)

    def remaining(self) -> float | None:
        """What a call may still take, as its `timeout_s`: never below 0; None = as long as it likes."""
        return None if self.at_s is None else max(0.0, self.at_s - self.clock())

    def allows(self, seconds: float) -> bool:
        """Whether something that takes so long is over before it."""
        remaining = self.remaining()
        return remaining is None or seconds < remaining
