"""Ctrl-C waits for the end of a step or an add: there a batch can be given up, and the engine serves the next one.

For the main thread, where Python delivers signals, and only while the program has no handler of its own. The second
Ctrl-C does not wait, and costs the engine.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_after() -> Iterator[None]:
    """A KeyboardInterrupt of the body is raised behind it."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_pending = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_pending
        if is_pending:
            raise KeyboardInterrupt
        is_pending = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_pending:
            raise KeyboardInterrupt
