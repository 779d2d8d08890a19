"""Ends a process with its parent, however that went: the pipe on stdin then reaches its end. One thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

STDIN = 0


def watch_parent(on_end: Callable[[], object]) -> None:
    """Call `on_end`, in the thread, when the pipe on stdin reaches its end."""

    def watch() -> None:
        # Not sys.stdin: its lock would be held by this thread when the interpreter ends.
        while os.read(STDIN, 1024):
            pass
        logger.info("the parent is gone")
        on_end()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
