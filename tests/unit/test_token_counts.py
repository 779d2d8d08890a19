"""Counts follow an output that grows, and equal a count of everything."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_executor.sampler.token_counts import TokenCounts

_tokens = st.lists(st.integers(0, 300), max_size=200)


@given(prompt=_tokens, output=_tokens, steps=st.lists(st.integers(0, 60), max_size=6))
def test_equals_a_count_of_everything(prompt, output, steps):
    counts = TokenCounts(np.array(prompt, dtype=np.int64))
    for length in (*np.cumsum(steps).tolist(), len(output)):
        counts.follow(np.array(output[:length], dtype=np.int64))
        if length >= len(output):
            break
    found = dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {**dict.fromkeys(prompt, 0), **Counter(output)}
    assert len(counts.token_ids) == len(found)


def test_only_new_tokens_are_looked_at():
    counts = TokenCounts(np.zeros(0, dtype=np.int64))
    output = np.array([5, 5, 6])
    counts.follow(output)
    output[:] = 9
    counts.follow(np.append(output, 6))
    assert dict(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True)) == {5: 2, 6: 2}
