"""A matrix product in Triton whose rows do not depend on each other, nor on how many there are: for batch invariance.

The libraries choose another kernel, and so another order of sums, for another number of rows. Here the tiles and the
order are fixed, which costs speed: used only where it is asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_core.model_executor.kernels.triton_tiles import multiply

_ROWS, _COLUMNS, _DEPTH = 64, 128, 64


def invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, n], weight [m, n], bias [m] -> [T, m]; contiguous."""
    num_columns, depth = weight.shape
    out = x.new_empty(len(x), num_columns)
    has_bias = bias is not None
    # Neighbouring programs share a part of the weight.
    _linear[(triton.cdiv(len(x), _ROWS), triton.cdiv(num_columns, _COLUMNS))](
        x, weight, bias if has_bias else weight, out, len(x), num_columns, depth,
        HAS_BIAS=has_bias, ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=32 if x.dtype == torch.float32 else _DEPTH,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, weight, bias, out, num_rows, num_columns, depth,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of columns)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < num_rows, columns < num_columns
    x_rows = x + rows.to(tl.int64)[:, None] * depth
    weight_rows = weight + columns.to(tl.int64)[:, None] * depth
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        at = start + tl.arange(0, DEPTH)
        is_in = (at < depth)[None, :]
        left = tl.load(x_rows + at[None, :], mask=is_row[:, None] & is_in, other=0.0)
        right = tl.load(weight_rows + at[None, :], mask=is_column[:, None] & is_in, other=0.0)
        sums += multiply(left, tl.trans(right))
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    result = sums.to(out.dtype.element_ty)
    at_out = out + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(at_out, result, mask=is_row[:, None] & is_column[None, :])
