"""The newest look at the device's memory, taken by the thread of a scrape, and seldom: a driver may keep it waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine_core.model_executor.executor import DeviceMemory, Executor

REFRESH_S = 10.0


class RecentMemory:
    """Threads that meet here look twice at worst."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # When, and what.
        self._look: tuple[float, DeviceMemory] | None = None

    def of(self, executor: Executor) -> DeviceMemory:
        """At most REFRESH_S old."""
        now, look = self._clock(), self._look
        if look is None or now - look[0] >= REFRESH_S:
            look = self._look = (now, executor.device_memory())
        return look[1]
