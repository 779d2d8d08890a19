"""Draws from a large vocabulary: candidates and group sums choose what every rule over all tokens chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_core.model_executor.sampler.draw import NOT_COVERED, Draws, draw, draw_from_all
from engine_core.model_executor.sampler.sampler import sample
from engine_core.model_executor.sampler.sampling_batch import SAMPLING_DTYPE, sampling_record
from engine_core.scheduler.request import SamplingParams
from fakes.sampling import greedy_row, make_batch, random_row

VOCAB_SIZE = 20_000


def peaked_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    """As of a language model: a few hundred tokens hold nearly all of the mass."""
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


def flat_logits(num_rows: int) -> torch.Tensor:
    """A power law over shuffled ids: far more tokens than candidates matter."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(VOCAB_SIZE, generator=generator) for _ in range(num_rows)])
    return -torch.log(ranks + 1.0)


def draws_of(num_rows: int, **sampling) -> Draws:
    records = [sampling_record(SamplingParams(seed=seed, **sampling)) for seed in range(num_rows)]
    return Draws.of(np.array(records, dtype=SAMPLING_DTYPE), np.arange(num_rows))


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.3},
        {"min_p": 0.05},
        {"top_k": 50},
        {"top_k": 511},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 0.5},
        {"top_p": 0.7, "min_p": 0.01},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.4},
    ],
    ids=str,
)
def test_equals_the_draw_from_all(sampling):
    logits = peaked_logits(100)
    draws = draws_of(100, **sampling)
    found, expected = draw(logits, draws), draw_from_all(logits, draws)
    covered = found != NOT_COVERED
    assert torch.equal(found[covered], expected[covered])
    assert covered.float().mean() > 0.9


@pytest.mark.parametrize(
    ("sampling", "is_covered"),
    [
        # Min-p leaves all candidates and drops most of what lies outside, which top-p must not count.
        ({"min_p": 5e-4, "top_p": 0.5}, True),
        ({"min_p": 5e-4, "top_p": 0.7, "temperature": 0.9}, True),
        ({"top_p": 0.4}, True),
        # Top-k drops tokens outside whose mass nobody knows.
        ({"top_k": 900, "top_p": 0.5}, False),
        ({"top_k": 600, "top_p": 0.5, "min_p": 1e-4}, False),
        ({"top_k": VOCAB_SIZE, "top_p": 0.4}, True),
    ],
    ids=str,
)
def test_top_p_counts_only_what_the_other_rules_leave(sampling, is_covered):
    logits, draws = flat_logits(200), draws_of(200, **sampling)
    expected = draw_from_all(logits, draws)
    found = draw(logits, draws)
    covered = found != NOT_COVERED
    assert torch.equal(found[covered], expected[covered])
    assert bool(covered.float().mean() > 0.9) is is_covered
    rows = [random_row(seed=seed, num_output=seed, **sampling) for seed in range(200)]
    assert sample(logits, make_batch(rows)).tolist() == expected.tolist()


@pytest.mark.parametrize("sampling", [{"top_p": 0.99999}, {"top_k": 5000}, {"top_k": 20_001, "top_p": 0.99}], ids=str)
def test_what_candidates_do_not_cover_is_told_apart_and_drawn_from_all(sampling):
    logits = peaked_logits(20) / 8
    draws = draws_of(20, **sampling)
    assert draw(logits, draws).tolist() == [NOT_COVERED] * 20
    rows = [random_row(seed=seed, num_output=seed, **sampling) for seed in range(20)]
    assert sample(logits, make_batch(rows)).tolist() == draw_from_all(logits, draws).tolist()


def test_ties_at_the_last_candidate_are_not_cut():
    # Of equal tokens all survive top-k: far more than there are candidates.
    logits = torch.zeros(1, VOCAB_SIZE)
    drawn = {int(sample(logits, make_batch([random_row(top_k=5, seed=seed)]))[0]) for seed in range(40)}
    assert len(drawn) > 30


def test_an_allowed_few_are_covered():
    row = random_row(top_p=0.9, allowed_token_ids=(5, 6, 19_000), seed=3)
    tokens = {int(sample(peaked_logits(1, seed), make_batch([row]))[0]) for seed in range(20)}
    assert tokens <= {5, 6, 19_000}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_token_does_not_depend_on_the_rest_of_a_large_batch(dtype):
    # More rows than are drawn at once, and every way to be drawn among them.
    kinds = [
        {},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 20},
        {"top_k": 3000},
        {"presence_penalty": 0.5, "output": [4, 5]},
    ]
    rows = [random_row(seed=seed, **kinds[seed % len(kinds)]) for seed in range(40)]
    rows[7], rows[20] = greedy_row(), greedy_row(logit_bias=((3, 50.0),))
    logits = peaked_logits(40).to(dtype)
    together = sample(logits.clone(), make_batch(rows, VOCAB_SIZE)).tolist()
    alone = [int(sample(logits[i : i + 1].clone(), make_batch([row], VOCAB_SIZE))[0]) for i, row in enumerate(rows)]
    assert together == alone


def test_rows_that_no_batch_names_are_greedy_and_stay_untouched():
    logits = peaked_logits(5)
    before = logits.clone()
    batch = make_batch([random_row(seed=1), greedy_row(allowed_token_ids=(9,))])
    batch.rows[:] = [1, 3]
    token_ids = sample(logits, batch)
    assert token_ids[[0, 2, 4]].tolist() == before.argmax(dim=-1)[[0, 2, 4]].tolist()
    assert token_ids[1] == draw_from_all(before[1:2], Draws.of(batch.params[:1], batch.token_indices[:1]))[0]
    assert token_ids[3] == 9
    assert torch.equal(logits[[0, 2, 4]], before[[0, 2, 4]])


def test_a_row_far_into_the_batch_that_is_not_covered_keeps_its_place():
    logits = peaked_logits(6)
    logits[4] = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(9)) / 10
    batch = make_batch([random_row(seed=1, top_p=0.5), random_row(seed=2, top_p=0.9)])
    batch.rows[:] = [2, 4]
    expected = draw_from_all(logits[4:5], Draws.of(batch.params[1:], batch.token_indices[1:]))
    assert sample(logits, batch)[4] == expected[0]
