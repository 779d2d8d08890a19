"""How late a timer comes: of the event loop, or of any thread that needs the interpreter.

Each wakes ten times a second, asks for nothing else, and notes how much later than asked it ran.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import NoReturn

from stepwire.histogram import Histogram

INTERVAL_S = 0.1


async def watch_loop_lag(lag: Histogram) -> NoReturn:
    """Body of a task on the event loop."""
    while True:
        due = time.monotonic() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        lag.observe(max(0.0, time.monotonic() - due))


class InterpreterLag:
    """A thread that waits for its turn as the I/O threads do; the only writer of `lag`."""

    def __init__(self, lag: Histogram) -> None:
        self._lag = lag
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="interpreter-lag", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread is gone."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + INTERVAL_S
        while not self._stopped.wait(INTERVAL_S):
            now = time.monotonic()
            self._lag.observe(max(0.0, now - due))
            due = now + INTERVAL_S
