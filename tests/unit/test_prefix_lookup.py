"""The common hit length of several groups of layers, against an oracle that tries every length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache.kv_cache_layout import KVCacheLayout
from engine_core.kv_cache.prefix_lookup import common_hit_length
from fakes.request_factory import make_layout

WINDOWS = st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=4)


def accepts(window: int | None, block_size: int, length: int, cached: set[int]) -> bool:
    """Whether each token that the next one may look at, and that came before the hit's end, is in a cached block."""
    end = length * block_size
    first = 0 if window is None else max(0, end - window + 1)
    return all(position // block_size in cached for position in range(first, end))


def oracle(layout: KVCacheLayout, limit: int, cached: list[set[int]]) -> int:
    return max(
        length
        for length in range(limit + 1)
        if all(
            accepts(group.sliding_window, layout.block_size, length, blocks)
            for group, blocks in zip(layout.groups, cached, strict=True)
        )
    )


@given(windows=WINDOWS, block_size=st.integers(1, 4), limit=st.integers(0, 8), data=st.data())
def test_the_largest_length_that_every_group_accepts(
    windows: list[int | None], block_size: int, limit: int, data: st.DataObject
) -> None:
    cached = [data.draw(st.sets(st.integers(0, 8))) for _ in windows]
    layout = make_layout(block_size, windows)
    found = common_hit_length(layout, limit, lambda group, index: index in cached[group])
    assert found == oracle(layout, limit, cached)


@pytest.mark.parametrize(
    ("windows", "cached", "length"),
    [
        ([None], [{0, 1, 3}], 2),
        # A window of 5 needs the last block before the end, and nothing older.
        ([5], [{3}], 4),
        ([6], [{3}], 0),
        ([6], [{2, 3}], 4),
        ([6], [{0}], 1),
        # Full attention ends at 3; the window accepts 4 and 2.
        ([None, 5], [{0, 1, 2}, {1, 3}], 2),
        # What one window accepts the other does not, until nothing is left.
        ([5, 5], [{0, 2}, {1, 3}], 0),
    ],
)
def test_examples_with_blocks_of_four(windows: list[int | None], cached: list[set[int]], length: int) -> None:
    layout = make_layout(4, windows)
    assert common_hit_length(layout, 4, lambda group, index: index in cached[group]) == length


def test_full_attention_cuts_what_the_windows_must_look_at() -> None:
    """A cold cache of a hybrid model costs one look-up, whatever the length of the prompt."""
    asked: list[tuple[int, int]] = []

    def is_cached(group: int, index: int) -> bool:
        asked.append((group, index))
        return False

    assert common_hit_length(make_layout(4, [8, None]), 1000, is_cached) == 0
    assert asked == [(1, 0)]
