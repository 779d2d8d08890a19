"""How far an engine's monotonic clock is ahead of ours, estimated from pings: for placing its events in a trace only.

Owner: the event loop.
"""

from __future__ import annotations

from collections import deque

# Clocks drift apart: an estimate is of the last pings alone.
_NUM_PINGS = 8
_NS = 1_000_000_000


class ClockOffset:
    """Of one life of an engine. Off by half a round trip at most."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        # (seconds of the round trip, ns of the engine's clock less ours)
        self._pings: deque[tuple[float, int]] = deque(maxlen=_NUM_PINGS)

    @property
    def is_known(self) -> bool:
        """A ping has come back."""
        return bool(self._pings)

    def note(self, sent: float, received: float, engine_ns: int) -> None:
        """A round trip in seconds of our clock, in whose middle the engine's clock most likely stood at `engine_ns`."""
        middle = (sent + received) / 2
        self._pings.append((received - sent, engine_ns - round(middle * _NS)))

    def to_ours(self, engine_ns: int) -> float:
        """Seconds of our clock at that time of the engine's, by the shortest round trip."""
        _, offset_ns = min(self._pings)
        return (engine_ns - offset_ns) / _NS
