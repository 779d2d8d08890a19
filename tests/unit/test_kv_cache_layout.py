"""How many blocks a request holds at most, against a walk through all its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from fakes.request_factory import make_layout


def blocks_in_step(window: int, block_size: int, start: int, end: int) -> int:
    """Blocks with a token that the step of positions [start, end) computes or may look at."""
    return len({position // block_size for position in range(max(0, start - window + 1), end)})


@given(
    window=st.integers(1, 12),
    block_size=st.integers(1, 5),
    step=st.integers(1, 9),
    num_tokens=st.integers(1, 40),
)
def test_no_step_needs_more(window: int, block_size: int, step: int, num_tokens: int) -> None:
    layout = make_layout(block_size, [window], step)
    most = layout.most_blocks(num_tokens)
    needed = [
        blocks_in_step(window, block_size, start, min(start + length, num_tokens))
        for start in range(num_tokens)
        for length in range(1, step + 1)
    ]
    assert max(needed) <= most
    # Reached, once a request is long enough to meet the worst position of its blocks.
    if num_tokens >= window + step + 2 * block_size:
        assert max(needed) == most


def test_groups_add_up_and_full_attention_keeps_everything() -> None:
    layout = make_layout(4, [None, 8, 8], max_step_tokens=4)
    assert layout.most_blocks(400) == 100 + 2 * 4
    assert layout.most_blocks(9) == 3 * 3


@pytest.mark.parametrize(("num_blocks", "length"), [(0, 0), (2, 0), (3, 4), (8, 8), (108, 400), (10**6, 1000)])
def test_the_longest_request_that_fits(num_blocks: int, length: int) -> None:
    assert make_layout(4, [None, 8, 8], max_step_tokens=4).longest_that_fits(num_blocks, 1000) == length


@pytest.mark.parametrize(("num_computed", "num_hidden"), [(0, 0), (4, 0), (5, 1), (20, 16)])
def test_a_token_sees_itself_and_the_window_before_it(num_computed: int, num_hidden: int) -> None:
    assert KVCacheGroup(sliding_window=5).num_hidden_tokens(num_computed) == num_hidden
    assert KVCacheGroup().num_hidden_tokens(num_computed) == 0
