"""When the cycle collector may look at everything: between requests, not in the middle of a frame of tokens.

By itself a full collection comes whenever enough objects have survived, and walks every request in flight while all
streams wait. Owner: the event loop. Used with the process's only collector, so once for each process.
"""

from __future__ import annotations

import gc

# Collections of the middle generation before a full one comes by itself.
_NEVER = 2**31 - 1
# A frontend that is never idle makes one this often.
MAX_INTERVAL_S = 60.0


class GarbageDuty:
    """`begin` when everything that lives as long as the process is there, then `tick` regularly."""

    def __init__(self) -> None:
        self._collected_at = 0.0
        self._has_worked = False

    def begin(self, now: float) -> None:
        """What exists now need never be looked at again."""
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._collected_at = now

    def tick(self, now: float, *, is_idle: bool) -> None:
        """Collect when idle, once after each time of work, or when the last collection is long ago."""
        is_due = now - self._collected_at >= MAX_INTERVAL_S
        if is_due or (is_idle and self._has_worked):
            gc.collect()
            self._collected_at = now
            self._has_worked = False
        self._has_worked |= not is_idle
