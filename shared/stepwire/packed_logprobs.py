"""Log-probabilities as packed arrays: rows of little-endian bytes, so that no side builds one object per entry.

The value behind the message Logprobs of the engine stream. Pure and immutable; whoever only passes rows on (scheduler,
outboxes, collectors) cuts and joins them without looking inside.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ITEM_BYTES = 4
# As a number of entries.
WHOLE_VOCABULARY = -1
# Prompt positions times entries of each, for one request. As messages of the public API that is about half of the
# largest message there may be.
MAX_PROMPT_ENTRIES = 1_000_000
# Ids a caller may choose for each position.
MAX_CHOSEN_TOKEN_IDS = 128

if array("I").itemsize != _ITEM_BYTES or array("f").itemsize != _ITEM_BYTES:
    raise ImportError("stepwire needs a platform whose unsigned int and float have 32 bits")


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """One row for each position: `width` (token id, log-probability) pairs, the position's own token first."""

    width: int
    # uint32, rows x width
    token_ids: bytes
    # float32, rows x width
    logprobs: bytes
    # uint32, rows: 1-based rank of the position's own token in the vocabulary
    ranks: bytes

    @property
    def num_rows(self) -> int:
        return len(self.ranks) // _ITEM_BYTES

    @property
    def row_bytes(self) -> int:
        return (2 * self.width + 1) * _ITEM_BYTES

    @property
    def num_bytes(self) -> int:
        return len(self.token_ids) + len(self.logprobs) + len(self.ranks)

    def require_rows(self, num_rows: int) -> None:
        """Raise ValueError unless there are that many rows, and every array is as long as that means."""
        expected = (num_rows * self.width * _ITEM_BYTES, num_rows * self.width * _ITEM_BYTES, num_rows * _ITEM_BYTES)
        found = (len(self.token_ids), len(self.logprobs), len(self.ranks))
        if self.width < 1 or found != expected:
            raise ValueError(f"log-probabilities of {num_rows} rows of {self.width} entries came as {found} bytes")

    def rows(self, start: int, stop: int | None = None) -> PackedLogprobs:
        """Rows [start, stop); stop None = to the end."""
        end = self.num_rows if stop is None else stop
        entries = slice(start * self.width * _ITEM_BYTES, end * self.width * _ITEM_BYTES)
        ranks = self.ranks[start * _ITEM_BYTES : end * _ITEM_BYTES]
        return PackedLogprobs(self.width, self.token_ids[entries], self.logprobs[entries], ranks)

    def unpack(self) -> tuple[list[int], list[float], list[int]]:
        """Token ids and log-probabilities of all rows one after another, and the ranks."""
        return _unpack("I", self.token_ids), _unpack("f", self.logprobs), _unpack("I", self.ranks)

    @classmethod
    def join(cls, parts: Sequence[PackedLogprobs]) -> PackedLogprobs:
        """All rows in order. Raises ValueError for none, and for parts of different width: they differ in meaning."""
        if len(parts) == 1:
            return parts[0]
        widths = {part.width for part in parts}
        if len(widths) != 1:
            raise ValueError(f"rows of {sorted(widths)} entries can not be joined")
        return cls(
            widths.pop(),
            b"".join(part.token_ids for part in parts),
            b"".join(part.logprobs for part in parts),
            b"".join(part.ranks for part in parts),
        )


def num_entries(asked: int, vocab_size: int) -> int:
    """How many most likely tokens `asked` stands for; never more than there are."""
    return vocab_size if asked == WHOLE_VOCABULARY else min(asked, vocab_size)


def _unpack(typecode: str, data: bytes) -> list[Any]:
    values = array(typecode, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
