"""How much of a request's beginning is cached: the longest prefix that every group of layers can start from.

Pure; asks whether a block is cached and never looks at the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_core.kv_cache.block import KVCacheBlock
from engine_core.kv_cache.kv_cache_layout import KVCacheGroup, KVCacheLayout

# (group, index of the block in the request's table)
IsCached = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a request can start from: its first `num_tokens` tokens need not be computed."""

    num_tokens: int
    # One row for each group, all of one length; the null block stands where the rest of the request does not look.
    rows: tuple[list[KVCacheBlock], ...]


NO_HIT = PrefixHit(0, ())


def common_hit_length(layout: KVCacheLayout, limit: int, is_cached: IsCached) -> int:
    """The largest number of leading blocks, up to `limit`, that all groups accept.

    Full attention accepts what is cached from the start on without a gap, so every shorter length too. A sliding
    window accepts a length when the blocks are cached that the window before its end needs; of shorter ones it may
    accept none, hence the repetition: each round takes the length down or ends.
    """
    length = limit
    windows: list[tuple[int, KVCacheGroup]] = []
    for index, group in enumerate(layout.groups):
        if group.sliding_window is None:
            length = _longest_run(index, length, is_cached)
        else:
            windows.append((index, group))
    while True:
        before = length
        for index, group in windows:
            length = _longest_window(index, group, layout.block_size, length, is_cached)
        if length == before:
            return length


def _longest_run(index: int, limit: int, is_cached: IsCached) -> int:
    length = 0
    while length < limit and is_cached(index, length):
        length += 1
    return length


def _longest_window(index: int, group: KVCacheGroup, block_size: int, limit: int, is_cached: IsCached) -> int:
    """Looks from the back, at each block once: a block that is missing rules out every length that needs it."""
    length = first_seen = limit
    while length > 0:
        first_needed = group.num_hidden_tokens(length * block_size) // block_size
        while first_seen > first_needed and is_cached(index, first_seen - 1):
            first_seen -= 1
        if first_seen <= first_needed:
            return length
        length = first_seen = first_seen - 1
    return 0
