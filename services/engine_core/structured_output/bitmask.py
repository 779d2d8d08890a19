"""Which tokens the grammars of a step allow: one row of bits for each grammar request that samples.

Owner: the step loop, while the forward pass runs. Rows are filled in parallel only when there are many: a row takes
microseconds, and a hand-over to a thread about as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine_core.scheduler.request import RequestKey

PARALLEL_ABOVE_ROWS = 128
CHUNK_ROWS = 16


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """Rows in any order; a request without a row is not restricted."""

    keys: list[RequestKey]
    # int32 [R, ceil(V / 32)]: bit t % 32 of word t // 32 = token t is allowed.
    words: np.ndarray


class RowSource(Protocol):
    """Whoever knows the next tokens of one request."""

    def fill(self, words: np.ndarray, row: int) -> None: ...


class BitmaskFiller:
    """Makes the bitmask of a step."""

    def __init__(self, vocab_size: int, num_threads: int) -> None:
        self._num_words = -(-vocab_size // 32)
        # Starts its threads with the first large step.
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="bitmask")

    def fill(self, rows: Sequence[tuple[RequestKey, RowSource]]) -> GrammarBitmask:
        sources = [source for _, source in rows]
        words = np.zeros((len(rows), self._num_words), dtype=np.int32)
        if len(rows) > PARALLEL_ABOVE_ROWS:
            starts = range(0, len(rows), CHUNK_ROWS)
            # Reading the results raises what a thread raised.
            list(self._threads.map(lambda start: _fill(sources, words, start, start + CHUNK_ROWS), starts))
        else:
            _fill(sources, words, 0, len(rows))
        return GrammarBitmask([key for key, _ in rows], words)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False)


def _fill(sources: Sequence[RowSource], words: np.ndarray, start: int, end: int) -> None:
    for row in range(start, min(end, len(sources))):
        sources[row].fill(words, row)
