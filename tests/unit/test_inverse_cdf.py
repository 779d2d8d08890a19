"""The walk by groups finds the token that the plain walk finds, whatever the size of the vocabulary."""

from __future__ import annotations

import pytest
import torch

from engine_core.model_executor.sampler.inverse_cdf import group_sums, invert_cdf, invert_wide_cdf


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 1000, 4096])
def test_equals_the_plain_walk(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(200, vocab_size, generator=generator)
    weights[torch.rand(200, vocab_size, generator=generator) < 0.5] = 0
    weights[:, vocab_size // 2] = 0.5
    numbers = torch.rand(200, dtype=torch.float64, generator=generator)
    found = invert_wide_cdf(weights, group_sums(weights), numbers)
    assert torch.equal(found, invert_cdf(weights.double(), numbers))


@pytest.mark.parametrize("number", [0.0, 2**-53, 1 - 2**-53, 1.0])
def test_the_ends_of_the_interval_are_possible_tokens(number):
    weights = torch.zeros(1, 300)
    weights[0, [70, 199]] = 1.0
    found = invert_wide_cdf(weights, group_sums(weights), torch.tensor([number], dtype=torch.float64))
    assert found.tolist() == [70 if number < 0.5 else 199]


@pytest.mark.parametrize("vocab_size", [1, 65, 1000])
@pytest.mark.parametrize("weight", [float("nan"), 0.0])
def test_weights_without_any_possible_token_give_an_id_of_the_vocabulary(vocab_size, weight):
    weights = torch.full((1, vocab_size), weight)
    [token_id] = invert_wide_cdf(weights, group_sums(weights), torch.tensor([0.5], dtype=torch.float64)).tolist()
    assert 0 <= token_id < vocab_size
