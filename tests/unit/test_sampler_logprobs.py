"""Packed rows equal log_softmax of the raw logits: values, order, ranks, and only of the rows that ask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.model_executor.sampler.logprobs import (
    PromptRows,
    SampledRow,
    pack_prompt,
    pack_sampled,
    raw_logprobs,
)
from engine_core.scheduler.request import LogprobsParams

VOCAB_SIZE = 37


def make_logits(num_rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def pack(logits: torch.Tensor, token_ids: list[int], **asked: LogprobsParams) -> dict:
    """Rows by their key; `r3=...` asks for row 3 of the logits."""
    rows = [SampledRow(int(name[1:]), ("s", int(name[1:])), params) for name, params in asked.items()]
    return {key[1]: found for key, found in pack_sampled(raw_logprobs(logits, rows), rows, token_ids).items()}


@settings(deadline=None, max_examples=50)
@given(
    num_top=st.integers(0, VOCAB_SIZE) | st.just(-1),
    chosen=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3, unique=True),
    own=st.integers(0, VOCAB_SIZE - 1),
    seed=st.integers(0, 9),
)
def test_a_row_equals_log_softmax(num_top: int, chosen: list[int], own: int, seed: int) -> None:
    logits = make_logits(1, seed)
    rows = pack(logits, [own], r0=LogprobsParams(num_top, None, tuple(chosen)))[0]
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    order = expected.argsort(descending=True).tolist()
    ids, values, ranks = rows.unpack()
    assert ids == [own, *order[: VOCAB_SIZE if num_top == -1 else num_top], *chosen]
    assert values == pytest.approx(expected[ids].tolist(), abs=1e-5)
    assert ranks == [order.index(own) + 1]
    rows.require_rows(1)


def test_only_rows_that_ask_are_packed_each_as_it_asks() -> None:
    logits = make_logits(4)
    found = pack(logits, [1, 2, 3, 4], r1=LogprobsParams(2), r3=LogprobsParams(0), r0=LogprobsParams(2))
    assert {index: rows.width for index, rows in found.items()} == {0: 3, 1: 3, 3: 1}
    assert [found[index].unpack()[0][0] for index in (0, 1, 3)] == [1, 2, 4]
    expected = logits.log_softmax(dim=-1)
    for index, token_id in ((0, 1), (1, 2), (3, 4)):
        assert found[index].unpack()[1][0] == pytest.approx(float(expected[index, token_id]), abs=1e-6)


def test_chosen_ids_alone_need_no_top() -> None:
    rows = pack(make_logits(1), [5], r0=LogprobsParams(None, None, (7, 5)))[0]
    assert rows.unpack()[0] == [5, 7, 5]


def test_equal_values_share_a_rank() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3] = 1.0
    assert [pack(logits, [own], r0=LogprobsParams(0))[0].unpack()[2] for own in (3, 4, 36)] == [[1], [2], [2]]


def test_half_precision_logits_are_widened_first() -> None:
    """log_softmax in bfloat16 would be off in the second digit."""
    logits = make_logits(1, dtype=torch.bfloat16)
    value = pack(logits, [5], r0=LogprobsParams(0))[0].unpack()[1][0]
    assert value == pytest.approx(float(logits[0].double().log_softmax(dim=-1)[5]), abs=1e-5)


def test_the_copy_survives_what_the_sampler_does_to_the_logits() -> None:
    logits = make_logits(2)
    rows = [SampledRow(1, ("s", 1), LogprobsParams(0))]
    before = raw_logprobs(logits, rows)
    expected = before.clone()
    logits.fill_(float("-inf"))
    assert torch.equal(before, expected)


@pytest.mark.parametrize("num_rows", [1, 64, 65, 200])
def test_prompt_rows_are_computed_in_bounded_slices(num_rows: int) -> None:
    logits = make_logits(num_rows + 5)
    slices: list[int] = []

    def compute(indices: np.ndarray) -> torch.Tensor:
        slices.append(len(indices))
        return logits[torch.from_numpy(indices)]

    token_ids = np.arange(num_rows) % VOCAB_SIZE
    found = pack_prompt(PromptRows(("s", 1), 9, 2, np.arange(5, num_rows + 5), token_ids), compute)
    assert found.start == 9
    assert sum(slices) == num_rows
    assert max(slices) <= 64
    ids, values, ranks = found.rows.unpack()
    expected = logits[5:].double().log_softmax(dim=-1)
    top = expected.topk(2, dim=-1).indices.tolist()
    assert ids == [value for own, best in zip(token_ids.tolist(), top, strict=True) for value in (own, *best)]
    own_values = expected.gather(1, torch.from_numpy(token_ids)[:, None])
    assert values[::3] == pytest.approx(own_values[:, 0].tolist(), abs=1e-5)
    assert ranks == ((expected > own_values).sum(dim=-1) + 1).tolist()
