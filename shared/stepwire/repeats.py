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
    """One fault. `newest`: the last repeat without a line, if there is one since the last line."""

    last_line: float
    num: int = 1
    newest: logging.LogRecord | None = None


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
        if seen.newest is None:
            timer = threading.Timer(self._interval_s, self._tell, (key,))
            timer.daemon = True
            timer.start()
        seen.newest = _without_exception(record)
        return None

    def close(self) -> None:
        """Also at the end of the process: what is counted is told."""
        for key in list(self._seen):
            self._tell(key)
        super().close()

    def _tell(self, key: Key) -> None:
        with self.lock or contextlib.nullcontext():
            seen = self._seen.get(key)
            if seen is not None and seen.newest is not None:
                super().emit(self._again(seen.newest, key, seen))

    def _again(self, record: logging.LogRecord, key: Key, seen: _Seen) -> logging.LogRecord:
        """About the same request, without the traceback."""
        seen.last_line, seen.newest = self._clock(), None
        line = _without_exception(record)
        _, _, origin = key
        line.msg, line.args = "%s again%s, %d times by now", (record.getMessage(), origin and f": {origin}", seen.num)
        return line


def _without_exception(record: logging.LogRecord) -> logging.LogRecord:
    """A copy that keeps no frames, and nothing that is in them."""
    line = copy.copy(record)
    line.exc_info = line.exc_text = None
    return line


def _key_of(record: logging.LogRecord) -> Key | None:
    """None: it is no failure."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return (record.name, record.getMessage(), "") if record.levelno >= logging.WARNING else None
    frames = list(traceback.walk_tb(error.__traceback__))
    place = f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}" if frames else "nowhere"
    return (record.name, str(record.msg), f"{type(error).__name__} at {place}")
