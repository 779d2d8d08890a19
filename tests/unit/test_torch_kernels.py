"""The reference kernels against transformers' own modules: every other set is compared with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine_core.model_executor.kernels.interface import QKNorm
from engine_core.model_executor.kernels.torch_kernels import TorchKernels
from fakes.kernel_cases import Batch, Heads

KERNELS = TorchKernels()


def llama_norm(weight: torch.Tensor, eps: float) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(len(weight), eps)
    norm.weight.data = weight
    return norm


def test_add_rms_norm_is_that_of_llama():
    batch = Batch([(0, 5)])
    residual, x, weight = batch.random(5, 24), batch.random(5, 24), batch.weight(24)
    expected_residual = residual + x
    out = torch.empty_like(x)
    KERNELS.add_rms_norm(residual, x, weight, 1e-3, out)
    torch.testing.assert_close(residual, expected_residual)
    torch.testing.assert_close(out, llama_norm(weight, 1e-3)(expected_residual))


@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_rope_and_cache_is_that_of_llama_and_the_norms_are_those_of_qwen3(has_qk_norm):
    batch = Batch([(3, 4), (0, 2)], Heads(6, 2, 16))
    qkv = batch.random(6, batch.heads.row_size)
    angles = torch.from_numpy(batch.positions)[:, None] * torch.rand(1, 8)
    norm = QKNorm(batch.weight(16), batch.weight(16), 1e-6) if has_qk_norm else None
    query, key, value = qkv.view(6, 10, 16).clone().split([6, 2, 2], dim=1)
    if norm is not None:
        query_norm, key_norm = Qwen3RMSNorm(16, 1e-6), Qwen3RMSNorm(16, 1e-6)
        query_norm.weight.data, key_norm.weight.data = norm.query_weight, norm.key_weight
        query, key = query_norm(query), key_norm(key)
    full = torch.cat([angles, angles], dim=-1)
    expected_query, expected_key = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], full.cos()[None], full.sin()[None]
    )
    KERNELS.rope_and_cache(qkv, angles.cos(), angles.sin(), batch.cache, batch.metadata.slot_mapping, norm)
    torch.testing.assert_close(qkv.view(6, 10, 16)[:, :6], expected_query[0].transpose(0, 1))
    blocks, offsets = np.divmod(batch.metadata.slot_mapping.numpy(), 16)
    torch.testing.assert_close(batch.cache.keys[blocks, :, offsets], expected_key[0].transpose(0, 1))
    torch.testing.assert_close(batch.cache.values[blocks, :, offsets], value)


def test_features_beyond_the_rotary_ones_stay_as_they_are():
    batch = Batch([(0, 3)], Heads(2, 1, 16))
    qkv = batch.random(3, batch.heads.row_size)
    before = qkv.clone()
    KERNELS.rope_and_cache(qkv, torch.zeros(3, 4), torch.ones(3, 4), batch.cache, batch.metadata.slot_mapping, None)
    heads, heads_before = qkv.view(3, 4, 16)[:, :2], before.view(3, 4, 16)[:, :2]
    # A quarter turn: the first half takes the place of the second, with the sign changed.
    torch.testing.assert_close(heads[..., 4:8], heads_before[..., :4])
    torch.testing.assert_close(heads[..., :4], -heads_before[..., 4:8])
    torch.testing.assert_close(heads[..., 8:], heads_before[..., 8:])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_act_mul_is_the_activation_of_transformers(activation):
    from transformers.activations import ACT2FN

    gate_up, out = torch.randn(3, 16) * 3, torch.empty(3, 8)
    KERNELS.act_mul(gate_up, activation, out)
    name = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[activation]
    torch.testing.assert_close(out, ACT2FN[name](gate_up[:, :8]) * gate_up[:, 8:])
