"""A histogram that several threads may write. Never for a step loop, which waits for nobody."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from stepwire.histogram import Histogram


class SharedHistogram(Histogram):
    """Held up by other writers only, for a search and two additions."""

    __slots__ = ("_lock",)

    def __init__(self, bounds: Sequence[float] = ()) -> None:
        super().__init__(bounds)
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            super().observe(value)
