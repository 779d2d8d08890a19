"""Residual add + RMS norm, and activation * up, in Triton: one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_core.model_executor.kernels.interface import Activation
from engine_core.model_executor.kernels.triton_tiles import tanh

_COLUMNS = 1024


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    num_features = residual.shape[1]
    columns = triton.next_power_of_2(num_features)
    _add_rms_norm[(len(residual),)](
        residual, residual if x is None else x, weight, out, num_features, eps,
        HAS_X=x is not None, COLUMNS=columns, num_warps=min(16, max(1, columns // 512)),
    )  # fmt: skip


def act_mul(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    num_features = out.shape[1]
    _act_mul[(len(out), triton.cdiv(num_features, _COLUMNS))](
        gate_up, out, num_features, ACTIVATION=activation, COLUMNS=_COLUMNS, num_warps=4
    )


@triton.jit
def _add_rms_norm(residual, x, weight, out, num_features, eps, HAS_X: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row)"""
    columns = tl.arange(0, COLUMNS)
    mask = columns < num_features
    at = tl.program_id(0).to(tl.int64) * num_features + columns
    values = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_X:
        added = values + tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        rounded = added.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=mask)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / num_features + eps)
    result = values * inverse * tl.load(weight + columns, mask=mask, other=0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _act_mul(gate_up, out, num_features, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, part of the columns)"""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < num_features
    at = gate_up + row * 2 * num_features + columns
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + num_features, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "gelu_tanh":
        activated = 0.5 * gate * (1 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        activated = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + row * num_features + columns, (activated * up).to(out.dtype.element_ty), mask=mask)
