"""What the quality benchmark makes of log-probabilities."""

from __future__ import annotations

import math

import pytest

from bench.quality import Reading, agreement, reading_of
from offline.outputs import Logprob


def entries(**logprobs: float) -> dict[int, Logprob]:
    return {int(name[1:]): Logprob(value, None, b"") for name, value in logprobs.items()}


def test_perplexity_is_that_of_the_tokens_of_the_text_and_the_first_is_behind_nothing():
    reading = reading_of([5, 6, 7], [None, entries(t6=-1.0, t9=-0.5), entries(t7=-3.0)])
    assert reading.perplexity == pytest.approx(math.exp(2.0))
    assert reading.likeliest == [9, 7]


def test_agreement_is_the_share_of_positions():
    assert agreement(Reading([1, 2, 3, 4], 1.0), Reading([1, 2, 0, 4], 2.0)) == 0.75
