"""Counts by reason for metrics, from any thread. Every known reason exists from the start, with 0."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class ReasonCounter:
    """Only ever grows."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(reasons, 0))

    def add(self, reason: str, num: int = 1) -> None:
        if num:
            with self._lock:
                self._counts[reason] += num

    def snapshot(self) -> dict[str, int]:
        """One operation of the interpreter, and no lock that a writer could wait for."""
        return dict(self._counts)
