"""How long utility calls took, by operation and outcome. Written by the busy-loop thread, read by scrapes."""

from __future__ import annotations

import re
from collections.abc import Callable

from engine_core.messages import UtilityCall
from stepwire.histogram import Histogram
from stepwire.metrics import WIDE_BUCKETS

OK = "OK"
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class UtilityTimes:
    """From the loop taking a call to its answer; a sleep, for one, lasts until the engine is idle."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: dict[tuple[str, int], float] = {}
        # (operation, code)
        self.found: dict[tuple[str, str], Histogram] = {}

    def begin(self, call: UtilityCall) -> None:
        self._began[call.session_id, call.call_id] = self._clock()

    def end(self, call: UtilityCall, code: str) -> None:
        """`code` is OK or the reason of the refusal."""
        began = self._began.pop((call.session_id, call.call_id), self._clock())
        key = (_WORD_START.sub("_", type(call.operation).__name__).lower(), code)
        self.found.setdefault(key, Histogram(WIDE_BUCKETS)).observe(self._clock() - began)
