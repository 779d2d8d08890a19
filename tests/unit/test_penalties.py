"""Repetition, frequency and presence penalties against a reference that walks the tokens one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_executor.sampler.penalties import apply_penalties
from fakes.sampling import random_row, ruled_rows

VOCAB_SIZE = 12
_tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)
_penalty = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 2.0])


def _reference(logits, prompt, output, repetition, frequency, presence):
    expected = list(logits)
    for token_id in set(prompt) | set(output):
        value = expected[token_id]
        expected[token_id] = value / repetition if value > 0 else value * repetition
    for token_id, count in Counter(output).items():
        expected[token_id] -= frequency * count + presence
    return expected


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE),
    _tokens,
    _tokens,
    st.sampled_from([0.5, 1.0, 1.3]),
    _penalty,
    _penalty,
)
def test_equals_the_reference(values, prompt, output, repetition, frequency, presence):
    row = random_row(
        prompt=prompt,
        output=output,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    logits = torch.tensor([values, values], dtype=torch.float32)
    # The row before it has no penalties and must stay as it is.
    apply_penalties(logits, ruled_rows([random_row(), row], VOCAB_SIZE))
    expected = _reference(values, prompt, output, repetition, frequency, presence)
    np.testing.assert_allclose(logits[1].numpy(), expected, rtol=1e-5, atol=1e-5)
    assert logits[0].tolist() == torch.tensor(values, dtype=torch.float32).tolist()


def test_repetition_counts_the_prompt_and_the_others_do_not():
    logits = torch.ones(2, 4)
    rows = [random_row(prompt=[1], repetition_penalty=2.0), random_row(prompt=[1], presence_penalty=1.0)]
    apply_penalties(logits, ruled_rows(rows, 4))
    assert logits.tolist() == [[1.0, 0.5, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]


def test_a_forbidden_token_stays_forbidden():
    logits = torch.tensor([[0.0, float("-inf")]])
    apply_penalties(logits, ruled_rows([random_row(output=[1], repetition_penalty=0.5, frequency_penalty=-2.0)], 2))
    assert logits.tolist() == [[0.0, float("-inf")]]
