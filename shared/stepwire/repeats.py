"""Keeps one fault from filling the log: the first of equal failures is written in full, the others are counted.

A fault may come again with every step or every request. Equal are exceptions of one message, type and place, whichever
request met them and whatever the numbers in the message; and warnings of one text. Lesser lines are left alone.
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

# More than the program has places; texts of warnings may differ without end, and the oldest are forgotten.
MAX_SEEN = 1000

# Name of the logger, message, and where an exception comes from.
Key = tuple[str, str, str]


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
        # Guarded by the lock of the handler.
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
            if len(self._seen) > MAX_SEEN:
                del self._seen[next(iter(self._seen))]
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
            seen = self._seen.get(key)
            if seen is not None and seen.num_silent:
                super().emit(self._again(record, key, seen))
                self.flush()

    def _again(self, record: logging.LogRecord, key: Key, seen: _Seen) -> logging.LogRecord:
        """About the same request, without the traceback."""
        seen.last_line, seen.num_silent = self._clock(), 0
        line = copy.copy(record)
        _, _, origin = key
        line.msg, line.args = "%s again%s, %d times by now", (record.getMessage(), origin and f": {origin}", seen.num)
        line.exc_info = line.exc_text = None
        return line


def _key_of(record: logging.LogRecord) -> Key | None:
    """None: it is no failure."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return (record.name, record.getMessage(), "") if record.levelno >= logging.WARNING else None
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
    return (record.name, str(record.msg), f"{type(error).__name__} at {place}")
