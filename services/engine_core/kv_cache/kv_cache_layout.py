"""How the layers of a model share the KV cache: groups of layers with one block table each, over blocks of one pool.

Pure descriptions and counts; owned by nobody, changed by nobody.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that see the same tokens, and so share a block table."""

    num_layers: int = 1
    # W: a token sees itself and the W - 1 tokens before it. None: full attention, all tokens before it.
    sliding_window: int | None = None

    def num_hidden_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that no token from position `num_computed_tokens` on sees."""
        return 0 if self.sliding_window is None else max(0, num_computed_tokens - self.sliding_window + 1)


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """The groups of a model. A block holds `block_size` tokens for the layers of one group at a time."""

    block_size: int
    groups: tuple[KVCacheGroup, ...]
    # Most tokens of one request that a step computes: all of them need slots, whatever the window.
    max_step_tokens: int

    def num_blocks_for(self, num_tokens: int) -> int:
        """Entries of each block table."""
        return -(-num_tokens // self.block_size)

    def most_blocks_in(self, group: KVCacheGroup, num_tokens: int) -> int:
        """Most blocks of one group that a request of this length holds at a time."""
        num_blocks = self.num_blocks_for(num_tokens)
        if group.sliding_window is None:
            return num_blocks
        # The window before a step's first token, and the step: so many tokens in a row touch so many blocks at worst.
        num_visible_tokens = group.sliding_window - 1 + self.max_step_tokens
        return min(num_blocks, (num_visible_tokens - 2) // self.block_size + 2)

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks of all groups that a request of this length holds at a time."""
        return sum(self.most_blocks_in(group, num_tokens) for group in self.groups)

    def longest_that_fits(self, num_blocks: int, limit: int) -> int:
        """The longest request of at most `limit` tokens that `num_blocks` blocks can hold."""
        return bisect_right(range(1, limit + 1), num_blocks, key=self.most_blocks)
