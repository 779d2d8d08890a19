"""What makes a process unwell, whichever service it is; each is a real burden that its own metrics have to show."""

from __future__ import annotations

import gc
import threading

LEAK_BYTES = 20_000_000
LEAK_EVERY_S = 0.5
# Enough for an alert; a test that hangs must not take the machine's memory.
MAX_LEAKS = 60
NUM_OBJECTS = 1_500_000


def leak() -> None:
    """Hold on to ever more memory."""
    held, tick = [], threading.Event()

    def grow() -> None:
        while len(held) < MAX_LEAKS:
            held.append(b"x" * LEAK_BYTES)
            tick.wait(LEAK_EVERY_S)

    threading.Thread(target=grow, daemon=True).start()


def collect_much_garbage() -> None:
    """Keep millions of objects alive, through which the collector goes again and again."""
    tick = threading.Event()

    def collect() -> None:
        held = [[number] for number in range(NUM_OBJECTS)]
        while held:
            gc.collect()
            tick.wait(0.2)

    threading.Thread(target=collect, daemon=True).start()
