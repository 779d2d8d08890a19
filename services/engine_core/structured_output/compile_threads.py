"""The threads that compile grammars, and what happens to one that does not come back.

A compile can not be interrupted. One that overruns is written off: it may end when it wants, nobody waits for it, and
a new thread takes its place, up to a limit. Daemon threads: such a compile must not hold up the end of the process.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Each of them burns a core until it ends; beyond this many, new compiles wait for one of them.
MAX_WRITTEN_OFF = 8


class CompileThreads:
    """`num_threads` workers of one queue. `write_off` may be called from any thread."""

    def __init__(self, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_written_off = 0
        self._num_threads = 0
        for _ in range(num_threads):
            self._start_thread()

    def submit(self, job: Callable[[], None]) -> None:
        """Run it as soon as a thread is free. It must not raise."""
        self._jobs.put(job)

    def write_off(self) -> bool:
        """A running job has overrun: another thread takes its place while that one lasts. False = no more of them."""
        with self._lock:
            if self._num_written_off >= MAX_WRITTEN_OFF:
                logger.warning("%d compiles of grammars overrun their time and have not ended", MAX_WRITTEN_OFF)
                return False
            self._num_written_off += 1
        self._start_thread()
        return True

    def come_back(self) -> None:
        """A job that was written off has ended after all: one thread too many is there."""
        with self._lock:
            self._num_written_off -= 1
        self._jobs.put(None)

    def shutdown(self) -> None:
        """Idle threads end; a running job is not waited for."""
        with self._lock:
            num_threads = self._num_threads
        for _ in range(num_threads):
            self._jobs.put(None)

    def _start_thread(self) -> None:
        with self._lock:
            self._num_threads += 1
        threading.Thread(target=self._run, name="grammar", daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        with self._lock:
            self._num_threads -= 1
