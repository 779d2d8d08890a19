"""Chained block hashes: equal hash = equal tokens from the start of the prompt on, for equal salt and configuration.

SHA-256 always: a weak or process-random hash would let one tenant craft hits on another tenant's blocks, and would
make engines disagree about the same prompt.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable

# Known tokens of positions [start, end).
TokenSlice = Callable[[int, int], list[int]]


class BlockHasher:
    """Hashes full blocks of token ids. Stateless, so the input thread and the loop may share one."""

    def __init__(self, block_size: int, seed: str) -> None:
        self._block_size = block_size
        # The block size takes part: blocks of different sizes never share a hash.
        self._root = hashlib.sha256(f"{block_size}:{seed}".encode()).digest()

    def extend(self, block_hashes: list[bytes], num_tokens: int, token_ids: TokenSlice, salt: str) -> None:
        """Append the hashes of the full blocks of `num_tokens` known tokens that `block_hashes` lacks."""
        size = self._block_size
        for start in range(len(block_hashes) * size, num_tokens - size + 1, size):
            # The salt enters the first block only; the chain carries it to all others.
            extra = salt.encode() if start == 0 else b""
            parent = block_hashes[-1] if block_hashes else self._root
            block_hashes.append(_hash_block(parent, token_ids(start, start + size), extra))


def _hash_block(parent: bytes, token_ids: list[int], extra: bytes) -> bytes:
    # Parent and tokens have fixed lengths, so the concatenation is unambiguous.
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return hashlib.sha256(parent + values.tobytes() + extra).digest()
