"""The arg-max by bits and by NumPy is torch's: any sign, any type, and the lowest id of equal maxima."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_executor.sampler.arg_max import arg_max

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
_INF = float("inf")
_values = st.sampled_from([-_INF, -3.0, -1.0, -0.5, 0.0, 0.25, 2.0, 7.0]) | st.floats(-100, 100, width=16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(rows=st.lists(st.lists(_values, min_size=5, max_size=5), min_size=1, max_size=4))
def test_equals_the_first_maximum(dtype, rows):
    logits = torch.tensor(rows).to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert arg_max(logits).tolist() == expected
    assert arg_max(logits).dtype == torch.int64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wide_row_and_one_of_negative_numbers_alone(dtype):
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[2:4] = -logits[2:4].abs() - 1
    before = logits.clone()
    assert arg_max(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert torch.equal(logits, before)


def test_rows_with_a_stride():
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert arg_max(logits[::2]).tolist() == logits.argmax(dim=-1).tolist()[::2]
