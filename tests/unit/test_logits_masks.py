"""Allowed ids, bad words, logit bias and min_tokens, each by its effect on the logits."""

from __future__ import annotations

import pytest
import torch

from engine_core.model_executor.sampler.logits_masks import apply_logits_masks
from fakes.sampling import make_batch, random_row, ruled_rows

INF = float("inf")


def masked(vocab_size: int = 8, **row) -> list[float]:
    logits = torch.arange(vocab_size, dtype=torch.float32)[None]
    apply_logits_masks(logits, ruled_rows([random_row(**row)], vocab_size))
    return logits[0].tolist()


def banned(**row) -> list[int]:
    return [token_id for token_id, value in enumerate(masked(**row)) if value == -INF]


def test_allowed_ids_keep_their_logits_and_all_others_go():
    assert masked(allowed_token_ids=(2, 5)) == [-INF, -INF, 2.0, -INF, -INF, 5.0, -INF, -INF]


def test_logit_bias_is_added():
    assert masked(logit_bias=((1, 2.5), (7, -100.0)))[:2] == [0.0, 3.5]
    assert masked(logit_bias=((1, 2.5), (7, -100.0)))[7] == -93.0


@pytest.mark.parametrize(
    ("output", "expected"),
    [([], []), ([3], [5]), ([3, 4], [6]), ([4], []), ([1, 3], [5]), ([3, 1], []), ([1, 2, 3, 4], [6])],
)
def test_a_bad_word_is_banned_only_after_its_beginning(output, expected):
    assert banned(bad_words=((3, 5), (3, 4, 6)), output=output) == expected


def test_a_bad_word_in_the_prompt_is_no_beginning():
    assert banned(bad_words=((3, 5),), prompt=[3]) == []


def test_a_bad_word_of_one_token_is_always_banned():
    assert banned(bad_words=((4,), (6,))) == [4, 6]


@pytest.mark.regression(15)
@pytest.mark.parametrize(("num_output", "expected"), [(0, [2, 3]), (2, [2, 3]), (3, []), (4, [])])
def test_stop_ids_are_banned_below_min_tokens(num_output, expected):
    assert banned(min_tokens=3, masked=(2, 3), num_output=num_output) == expected


def test_no_bias_lifts_a_ban():
    assert banned(min_tokens=1, masked=(2,), bad_words=((4,),), logit_bias=((2, 100.0), (4, 100.0))) == [2, 4]


def test_allowed_and_banned_together():
    assert masked(allowed_token_ids=(2, 5), bad_words=((5,),)) == [-INF, -INF, 2.0, -INF, -INF, -INF, -INF, -INF]


def test_a_ban_of_all_that_is_allowed_is_dropped():
    # Something must be sampled, and it had better be allowed.
    assert [i for i, value in enumerate(masked(allowed_token_ids=(2,), min_tokens=5, masked=(2,))) if value > -INF] == [
        2
    ]


def test_ids_outside_the_vocabulary_rule_nothing():
    row = {"min_tokens": 1, "masked": (2, 99), "bad_words": ((99,), (3, 99)), "logit_bias": ((99, 5.0), (1, 1.0))}
    assert masked(**row)[:3] == [0.0, 2.0, -INF]
    assert banned(allowed_token_ids=(4, 99)) == [0, 1, 2, 3, 5, 6, 7]


def test_other_rows_are_untouched():
    logits = torch.zeros(3, 4)
    rows = [random_row(), random_row(allowed_token_ids=(1,)), random_row(min_tokens=1, num_output=1, masked=(0,))]
    apply_logits_masks(logits, ruled_rows(rows, 4))
    assert logits[[0, 2]].eq(0).all()
    assert logits[1].tolist() == [-INF, 0.0, -INF, -INF]


def test_rows_without_rules_cost_nothing():
    assert make_batch([random_row(), random_row(min_tokens=3, masked=(1,), num_output=3)]).ruled_rows == []
