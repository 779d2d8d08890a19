"""Truncation: which tokens survive min-p, top-k and top-p, at ties and when the nucleus is wide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_core.model_executor.sampler.top_k_top_p import apply_min_p, apply_top_k, apply_top_p


def _log(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def _kept(logits: torch.Tensor) -> list[list[int]]:
    return [torch.nonzero(row > float("-inf"))[:, 0].tolist() for row in logits]


@pytest.mark.parametrize(("min_p", "expected"), [(0.0, [0, 1, 2, 3]), (0.21, [0, 1, 2]), (0.5, [0, 2]), (1.0, [2])])
def test_min_p_is_relative_to_the_likeliest(min_p, expected):
    logits = _log(0.3, 0.14, 0.5, 0.06)
    apply_min_p(logits, np.array([min_p]))
    assert _kept(logits) == [expected]


@pytest.mark.parametrize(
    ("top_k", "expected"), [(0, [0, 1, 2, 3]), (1, [2]), (2, [0, 2]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k(top_k, expected):
    logits = _log(0.3, 0.14, 0.5, 0.06)
    apply_top_k(logits, np.array([top_k]))
    assert _kept(logits) == [expected]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1e-9, [2]), (0.49, [2]), (0.51, [0, 2]), (0.81, [0, 1, 2]), (0.95, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_is_the_smallest_set_that_reaches_the_mass(top_p, expected):
    logits = _log(0.3, 0.14, 0.5, 0.06)
    apply_top_p(logits, np.array([top_p]))
    assert _kept(logits) == [expected]


def test_equal_tokens_share_their_fate():
    logits = torch.zeros(2, 6, dtype=torch.float64)
    apply_top_k(logits, np.array([2, 0]))
    apply_top_p(logits, np.array([1.0, 0.1]))
    assert _kept(logits) == [list(range(6))] * 2


def test_rows_have_their_own_limits():
    logits = _log(0.4, 0.3, 0.2, 0.1).repeat(4, 1)
    apply_top_k(logits, np.array([3, 0, 1, 0]))
    apply_top_p(logits, np.array([1.0, 0.65, 1.0, 1.0]))
    assert _kept(logits) == [[0, 1, 2], [0, 1], [0], [0, 1, 2, 3]]


def test_top_p_sees_what_top_k_left():
    logits = _log(0.4, 0.3, 0.2, 0.1)
    apply_top_k(logits, np.array([2]))
    # 0.4 / 0.7 = 0.57 of what is left.
    apply_top_p(logits, np.array([0.55]))
    assert _kept(logits) == [[0]]


def test_a_nucleus_wider_than_the_first_candidates():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5000, generator=generator, dtype=torch.float64) * 0.1
    logits[1, 17] = 30.0
    expected = []
    for row, top_p in zip(logits, (0.9, 0.9, 0.02), strict=True):
        probabilities = row.softmax(dim=0)
        order = probabilities.argsort(descending=True)
        before = probabilities[order].cumsum(dim=0) - probabilities[order]
        expected.append(sorted(order[before < top_p].tolist()))
    apply_top_p(logits, np.array([0.9, 0.9, 0.02]))
    assert _kept(logits) == expected
    assert len(expected[0]) > 1024
    assert expected[1] == [17]
    assert len(expected[2]) < 1024
