"""The number behind a token: pure, in range, evenly spread, and unrelated between neighbouring seeds and indices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_executor.sampler.uniform import uniform


def _numbers(seeds, indices) -> np.ndarray:
    return uniform(np.asarray(seeds, dtype=np.uint64), np.asarray(indices, dtype=np.int64))


def _chi_square(numbers: np.ndarray, cells: int = 64) -> float:
    counts = np.bincount((numbers * cells).astype(int), minlength=cells)
    expected = len(numbers) / cells
    return float(((counts - expected) ** 2 / expected).sum())


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_in_range_and_the_same_next_to_any_neighbour(seed, index):
    alone = _numbers([seed], [index])[0]
    assert 0 <= alone < 1
    assert _numbers([7, seed, 9], [3, index, index])[1] == alone


def test_constants_do_not_change_unnoticed():
    # Another value would change every sampled answer, and a request would not go on unchanged on a newer engine.
    assert _numbers([0, 42, 2**64 - 1], [0, 1, 1000]).tolist() == [
        0.6524484863740322,
        0.9557467261317436,
        0.033884161635479915,
    ]


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63])
def test_even_over_the_tokens_of_one_request(seed):
    # 63 degrees of freedom: 126 is seven standard deviations off.
    assert _chi_square(_numbers([seed] * 50_000, np.arange(50_000))) < 126


@pytest.mark.parametrize("index", [0, 1, 99])
def test_even_over_consecutive_seeds(index):
    assert _chi_square(_numbers(np.arange(50_000), [index] * 50_000)) < 126


def test_neighbours_in_seed_and_in_index_are_uncorrelated():
    indices = np.arange(20_000)
    numbers = _numbers([5] * 20_000, indices)
    for other in (_numbers([6] * 20_000, indices), _numbers([5] * 20_000, indices + 1)):
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.05


def test_consecutive_seeds_do_not_share_a_shifted_sequence():
    streams = {seed: set(_numbers([seed] * 500, np.arange(500)).tolist()) for seed in range(20)}
    assert sum(len(stream) for stream in streams.values()) == len(set().union(*streams.values()))
