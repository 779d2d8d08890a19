"""The candidates are the likeliest tokens of each row, and the bound says what all others are below."""

from __future__ import annotations

import pytest
import torch

from engine_core.model_executor.sampler.candidates import NUM_CANDIDATES, likeliest

INF = float("inf")


def rows_of(found) -> list[dict[int, float]]:
    return [
        {token_id: value for token_id, value in zip(ids, values, strict=True) if value > -INF}
        for ids, values in zip(found.token_ids.tolist(), found.logits.tolist(), strict=True)
    ]


# Below, at and above the vocabularies whose groups are looked at instead of their tokens.
@pytest.mark.parametrize("vocab_size", [NUM_CANDIDATES + 1, 16_389, 32_767, 32_773, 49_152])
def test_at_least_the_likeliest_512_in_id_order(vocab_size):
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(0))
    found = likeliest(logits)
    for row, chosen, bound in zip(logits, rows_of(found), found.bounds.tolist(), strict=True):
        assert set(row.topk(NUM_CANDIDATES).indices.tolist()) <= chosen.keys()
        assert list(chosen) == sorted(chosen)
        assert len(chosen) < 2 * NUM_CANDIDATES
        others = row.clone()
        others[list(chosen)] = -INF
        assert others.max() <= bound <= min(chosen.values())
        assert all(row[token_id] == value for token_id, value in chosen.items())


def test_a_small_vocabulary_is_complete():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    found = likeliest(logits)
    assert torch.equal(found.logits, logits.double())
    assert found.bounds.tolist() == [-INF, -INF]


def test_of_a_row_with_few_possible_tokens_all_are_there_and_no_others():
    logits = torch.full((2, 40_000), -INF)
    logits[0, [7, 30_000]] = torch.tensor([1.0, 2.0])
    logits[1] = torch.arange(40_000.0)
    found = likeliest(logits)
    assert rows_of(found)[0] == {7: 1.0, 30_000: 2.0}
    assert found.bounds[0] == -INF
