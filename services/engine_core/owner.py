"""Who may end the engine: signals, and with `--owner parent` the end of the parent.

Queues are not re-entrant, so a signal handler must not touch one. The C-level handler writes the signal's number to a
socket (`signal.set_wakeup_fd`), and a thread of ours reads it there and may do anything.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def listen_for_signals(on_signal: Callable[[str], None]) -> None:
    """Call `on_signal(name)` on a helper thread for each SIGTERM and SIGINT. Main thread only, before anything slow."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno())
    for number in SIGNALS:
        # Python's own handler does nothing: its only effect is that the default one does not end the process.
        signal.signal(number, lambda _number, _frame: None)

    def read() -> None:
        # Holds `writer` too: a collected socket would close the wake-up descriptor.
        while writer.fileno() >= 0 and (numbers := reader.recv(64)):
            for number in numbers:
                if number in SIGNALS:
                    on_signal(signal.Signals(number).name)

    threading.Thread(target=read, name="signals", daemon=True).start()


def ignore_signals() -> None:
    """From now to the end of the process. Main thread only.

    The interpreter puts the default handlers back while it winds up, and a late SIGTERM would turn a clean exit into a
    killed process; what is ignored stays ignored.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def watch_parent(on_end: Callable[[str], None]) -> None:
    """Call `on_end` when stdin ends: the parent holds the other end of that pipe, and the kernel closes it for it."""

    # The descriptor, not sys.stdin: a thread that waits inside a buffered reader would abort the interpreter's exit.
    descriptor = sys.stdin.fileno()

    def read() -> None:
        while os.read(descriptor, 4096):
            pass
        on_end("the parent process has ended")

    threading.Thread(target=read, name="parent-watch", daemon=True).start()
