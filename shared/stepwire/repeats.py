"""Keeps one fault from filling the log: the first of equal failures is written in full, the others are counted.

For whatever is logged with an exception: a fault of ours may come again with every step or every request. Equal are
those of one message, type and place; with the request that met it, or the numbers in the message, they differ.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

# A fault that goes on has a line this often.
INTERVAL_S = 10.0

Key = tuple[str, str, str, str]


@dataclass(slots=True)
class _Seen:
    """One fault. `num_silent`: those since its last line."""

    last_line: float
    num: int = 1
    num_silent: int = 0


class RepeatHandler(logging.StreamHandler[TextIO]):
    """Writes the lines that are left. Repeats without one have theirs when the interval is over, from a thread."""

    def __init__(
        self, stream: TextIO, interval_s: float = INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self._interval_s = interval_s
        self._clock = clock
        # No larger than the program: places are lines of it. Guarded by the lock of the handler.
        self._seen: dict[Key, _Seen] = {}

    def emit(self, record: logging.LogRecord) -> None:
        key = _key_of(record)
        line = record if key is None else self._line(record, key)
        if line is not None:
            super().emit(line)

    def _line(self, record: logging.LogRecord, key: Key) -> logging.LogRecord | None:
        seen = self._seen.get(key)
        if seen is None:
            self._seen[key] = _Seen(self._clock())
            return record
        seen.num += 1
        if self._clock() - seen.last_line >= self._interval_s:
            return self._again(record, key, seen)
        seen.num_silent += 1
        if seen.num_silent == 1:
            timer = threading.Timer(self._interval_s, self.tell, (record, key))
            timer.daemon = True
            timer.start()
        return None

    def tell(self, record: logging.LogRecord, key: Key) -> None:
        """The interval is over that began with this repeat; any thread."""
        with self.lock or contextlib.nullcontext():
            seen = self._seen[key]
            if seen.num_silent:
                super().emit(self._again(record, key, seen))
                self.flush()

    def _again(self, record: logging.LogRecord, key: Key, seen: _Seen) -> logging.LogRecord:
        """About the same request, without the traceback."""
        seen.last_line, seen.num_silent = self._clock(), 0
        line = copy.copy(record)
        _, _, name, place = key
        line.msg, line.args = "%s again: %s at %s, %d times by now", (record.getMessage(), name, place, seen.num)
        line.exc_info = line.exc_text = None
        return line


def _key_of(record: logging.LogRecord) -> Key | None:
    """None: it is no failure."""
    if not record.exc_info or record.exc_info[1] is None:
        return None
    error = record.exc_info[1]
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
    return (record.name, str(record.msg), type(error).__name__, place)
