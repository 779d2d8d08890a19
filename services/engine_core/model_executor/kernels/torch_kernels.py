"""The kernels in plain torch: the reference of every other set, and what serves where no faster one can be had."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata
from engine_core.model_executor.attention.torch_attention import attend_decodes, attend_prefill
from engine_core.model_executor.kernels.interface import Activation, QKNorm


class TorchKernels:
    """Implements `Kernels`."""

    name = "torch"

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        if x is not None:
            residual.add_(x)
        out.copy_(_rms_norm(residual, weight, eps))

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LayerKVCache,
        slot_mapping: torch.Tensor,
        qk_norm: QKNorm | None,
    ) -> None:
        num_kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        query, key, value = heads.tensor_split((heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads), 1)
        if qk_norm is not None:
            query.copy_(_rms_norm(query, qk_norm.query_weight, qk_norm.eps))
            key = _rms_norm(key, qk_norm.key_weight, qk_norm.eps).to(key.dtype)
        query.copy_(_rotate(query, cos, sin))
        cache.write(_rotate(key, cos, sin), value, slot_mapping)

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        for group in metadata.decode_groups:
            out[group.token_indices] = attend_decodes(query[group.token_indices], cache, group, options)
        for row in metadata.prefill_rows:
            out[row.start : row.end] = attend_prefill(query[row.start : row.end], cache, row, options)

    def act_mul(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        gate, up = gate_up.float().chunk(2, dim=-1)
        if activation == "silu":
            activated = functional.silu(gate)
        else:
            activated = functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
        out.copy_(activated * up)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [T, N, D], cos and sin [T, R] -> [T, N, D]"""
    half = cos.shape[1]
    first, second, rest = heads.float().tensor_split((half, 2 * half), dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(heads.dtype)
