"""How the layers of a model share KV blocks, and what so many blocks hold: the engine's rules. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from stepwire_client.sizing.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups of layers with one block table each, as (layers, window), over blocks of one pool."""

    groups: tuple[tuple[int, int | None], ...]
    block_size: int
    # Most tokens of one request in a step.
    max_step_tokens: int

    @property
    def layers_per_block(self) -> int:
        """A block has room for the layers of a largest group."""
        return max(num_layers for num_layers, _ in self.groups)

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request of this length holds at a time."""
        return sum(self._most_blocks_in(window, num_tokens) for _, window in self.groups)

    def tokens_that_fit(self, num_blocks: int, context: int) -> int:
        """Tokens in sequences of length `context`; one of the blocks is never used."""
        num_slots = -(-context // self.block_size) * self.block_size
        return (num_blocks - 1) * num_slots // self.most_blocks(context)

    def longest_that_fits(self, num_blocks: int, limit: int) -> int:
        """The longest request of at most `limit` tokens; one of the blocks is never used."""
        return bisect_right(range(1, limit + 1), num_blocks - 1, key=self.most_blocks)

    def _most_blocks_in(self, window: int | None, num_tokens: int) -> int:
        num_blocks = -(-num_tokens // self.block_size)
        if window is None:
            return num_blocks
        # What the first token of a step sees, and the step itself, which may begin anywhere in a block.
        in_a_row = window - 1 + self.max_step_tokens
        return min(num_blocks, (in_a_row - 2) // self.block_size + 2)


def layout_of(shape: ModelShape, block_size: int, max_step_tokens: int) -> Layout:
    """Layers of one window are a group; of several windows, groups of one size, so that any can use any block."""
    counts: dict[int | None, int] = {}
    for window in shape.windows:
        kind = None if window is None or window >= shape.max_model_len else window
        counts[kind] = counts.get(kind, 0) + 1
    size = _group_size(list(counts.values()))
    groups = [(min(size, count - start), window) for window, count in counts.items() for start in range(0, count, size)]
    return Layout(tuple(groups), block_size, max_step_tokens)


def _group_size(counts: list[int]) -> int:
    """The one that leaves the fewest places of layers empty; of equals the largest."""
    return min(counts, key=lambda size: (size * sum(-(-count // size) for count in counts), -size))
