"""Counting the requests to end: the first drains, the second aborts, later ones change nothing.

Called on helper threads (see `owner`), never in a signal handler. Before the model is loaded there is nothing to
drain: the process ends at once, which frees the device whatever the loader is doing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from engine_core.core_proc import EngineCoreProc

logger = logging.getLogger(__name__)


class ShutdownController:
    """One for each process."""

    def __init__(
        self, drain_timeout_s: float, before_exit: Callable[[], None], exit_process: Callable[[int], None] = os._exit
    ) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._before_exit = before_exit
        self._exit_process = exit_process
        self._lock = threading.Lock()
        self._proc: EngineCoreProc | None = None
        self._num_requests = 0

    def attach(self, proc: EngineCoreProc) -> None:
        """The loop exists: from now on a shutdown is a drain."""
        with self._lock:
            self._proc = proc

    def request(self, reason: str) -> None:
        """A signal came in."""
        with self._lock:
            self._num_requests += 1
            if self._proc is None:
                self._exit_while_starting(reason)
            elif self._num_requests == 1:
                self._proc.request_shutdown(self._drain_timeout_s, reason)
            elif self._num_requests == 2:
                logger.info("%s again: aborting what still runs", reason)
                self._proc.request_shutdown(0.0, reason)
            else:
                logger.info("%s again: ignored, the shutdown is bounded", reason)

    def drain(self, timeout_s: float | None, reason: str) -> None:
        """A utility call: counts as the first signal. Without a time it is the configured one."""
        with self._lock:
            self._num_requests += 1
            if self._proc is not None:
                self._proc.request_shutdown(self._drain_timeout_s if timeout_s is None else timeout_s, reason)

    def request_now(self, reason: str) -> None:
        """The owner is gone: abort all, free the device, exit."""
        with self._lock:
            if self._proc is None:
                self._exit_while_starting(reason)
            else:
                self._proc.request_shutdown(0.0, reason)

    def _exit_while_starting(self, reason: str) -> None:
        logger.info("shutting down before the start was complete: %s", reason)
        self._before_exit()
        self._exit_process(0)
