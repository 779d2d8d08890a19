"""Sampling as a whole: agreement with an obvious reference, the promised distribution, and no trace of neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.model_executor.sampler.inverse_cdf import invert_cdf
from engine_core.model_executor.sampler.sampler import sample
from engine_core.model_executor.sampler.uniform import uniform
from fakes.sampling import greedy_row, make_batch, random_row


def _softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def _reference_probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float):
    """Sort the whole vocabulary and walk it, one rule after the other."""
    scaled = logits.astype(np.float64) / temperature
    order = sorted(range(len(scaled)), key=lambda token_id: (-scaled[token_id], token_id))
    probabilities = _softmax(scaled)
    kept = [t for t in order if min_p == 0 or probabilities[t] >= min_p * probabilities[order[0]] * (1 - 1e-12)]
    kept = kept[:top_k] if top_k else kept
    nucleus, mass = [], 0.0
    remaining = _softmax(scaled[kept])
    for token_id, probability in zip(kept, remaining, strict=True):
        if nucleus and mass >= top_p:
            break
        nucleus.append(token_id)
        mass += probability
    result = np.zeros(len(scaled))
    result[nucleus] = _softmax(scaled[nucleus])
    return result


# Far apart, so that no rounding decides which token is in: what happens at ties has its own test.
_logits = st.lists(st.integers(-40, 40), min_size=2, max_size=24, unique=True).map(
    lambda values: np.array(values, dtype=np.float32) / 7
)


@settings(max_examples=300)
@given(
    logits=_logits,
    temperature=st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.05, 0.5, 0.83, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.2, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    index=st.integers(0, 5000),
)
def test_equals_the_reference(logits, temperature, top_k, top_p, min_p, seed, index):
    row = random_row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, num_output=index)
    token_id = int(sample(torch.from_numpy(logits.copy())[None], make_batch([row]))[0])
    expected = _reference_probabilities(logits, temperature, top_k, top_p, min_p)
    number = uniform(np.array([seed & (2**64 - 1)], dtype=np.uint64), np.array([index]))[0]
    cumulative = np.cumsum(expected)
    assert expected[token_id] > 0
    assert cumulative[token_id] > number - 1e-9
    assert cumulative[token_id] - expected[token_id] < number + 1e-9


def test_frequencies_follow_the_probabilities():
    logits = torch.tensor([1.0, -0.5, 2.0, 0.0, -3.0])
    count = 20_000
    batch = make_batch([random_row(temperature=0.8, seed=seed) for seed in range(count)])
    drawn = np.bincount(sample(logits.repeat(count, 1), batch), minlength=5) / count
    expected = torch.softmax(logits / 0.8, dim=0).numpy()
    # Five standard deviations of a share of 20 000 draws are at most 0.018.
    np.testing.assert_allclose(drawn, expected, atol=0.018)


def test_a_token_does_not_depend_on_the_rest_of_the_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 50, generator=generator)
    rows = [
        random_row(temperature=1.0, seed=3, num_output=4),
        greedy_row(),
        random_row(temperature=0.7, top_p=0.8, seed=3, num_output=4),
        random_row(temperature=1.3, top_k=5, seed=-1),
        random_row(temperature=1.3, min_p=0.1, seed=9),
        greedy_row(logit_bias=((3, 100.0),)),
        random_row(presence_penalty=1.5, output=[1, 2, 3], seed=11),
        random_row(allowed_token_ids=(4, 5, 6), seed=12),
        greedy_row(bad_words=((7,),)),
    ]
    together = sample(logits.clone(), make_batch(rows)).tolist()
    alone = [int(sample(logits[i : i + 1].clone(), make_batch([row]))[0]) for i, row in enumerate(rows)]
    backwards = sample(logits.flip(0).clone(), make_batch(rows[::-1])).tolist()[::-1]
    assert together == alone == backwards


def test_resumed_output_counts_as_output():
    # What a request draws for token 5 is the same whether the five before were generated here or elsewhere.
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    tokens = [
        int(sample(logits.clone(), make_batch([random_row(seed=8, prompt=prompt, output=[1] * 5)]))[0])
        for prompt in ([], [2, 3], [9] * 40)
    ]
    assert len(set(tokens)) == 1


def test_greedy_takes_the_first_of_equal_maxima():
    assert sample(torch.tensor([[1.0, 5.0, 5.0, 0.0]]), make_batch([greedy_row()])).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_float_type(dtype):
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]], dtype=dtype)
    assert sample(logits, make_batch([greedy_row(), random_row(top_k=1)])).tolist() == [1, 1]


def test_low_temperature_is_greedy_in_effect():
    logits = torch.randn(200, 300, generator=torch.Generator().manual_seed(2)).mul(20)
    batch = make_batch([random_row(temperature=0.01, seed=seed) for seed in range(200)])
    assert sample(logits.clone(), batch).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-4, 1e-40])
def test_the_coldest_temperatures_are_greedy_in_any_vocabulary(temperature):
    logits = torch.randn(20, 20_001, generator=torch.Generator().manual_seed(2)).mul(20)
    for sampling in ({}, {"top_p": 0.9}):
        rows = [random_row(temperature=temperature, seed=seed, **sampling) for seed in range(20)]
        assert sample(logits.clone(), make_batch(rows)).tolist() == logits.argmax(dim=-1).tolist()


class TestInvertCdf:
    def test_walks_in_id_order(self):
        probabilities = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)
        for number, token_id in ((0.0, 0), (0.2499, 0), (0.25, 1), (0.7499, 1), (0.75, 2), (1 - 2**-53, 2)):
            assert invert_cdf(probabilities, torch.tensor([number], dtype=torch.float64)).tolist() == [token_id]

    @settings(max_examples=200)
    @given(
        st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda weights: sum(weights) > 0),
        st.sampled_from([0.0, 2**-53, 0.3, 0.5, 0.999999, 1 - 2**-53]),
    )
    def test_never_takes_an_impossible_token(self, weights, number):
        probabilities = torch.tensor([weights], dtype=torch.float64)
        probabilities /= probabilities.sum()
        token_id = int(invert_cdf(probabilities, torch.tensor([number], dtype=torch.float64))[0])
        assert probabilities[0, token_id] > 0

    def test_a_number_that_rounds_to_one_takes_the_last_possible_token(self):
        probabilities = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
        assert invert_cdf(probabilities, torch.tensor([1.0], dtype=torch.float64)).tolist() == [1]
