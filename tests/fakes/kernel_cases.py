"""Random work for a set of kernels, and its comparison with the torch reference. Used for every set there is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache, LayerSpec
from engine_core.model_executor.attention.metadata import AttentionMetadata, build_attention_metadata
from engine_core.model_executor.kernels.interface import Activation, Kernels, QKNorm
from engine_core.model_executor.kernels.torch_kernels import TorchKernels

REFERENCE = TorchKernels()
# Of one rounding to the type, and of another order of sums.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Heads:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16

    @property
    def row_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Batch:
    """Sequences of (tokens computed before, tokens of this step) over a cache full of random keys and values."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        heads: Heads | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        self.heads, self.dtype, self.device = heads or Heads(), dtype, torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)
        seq_lens = np.array([before + now for before, now in sequences])
        num_blocks = -(-seq_lens // block_size)
        shuffled = (torch.randperm(int(num_blocks.sum()), generator=self._generator) + 1).numpy()
        tables = np.zeros((len(sequences), num_blocks.max() + 2), dtype=np.int64)
        for row, blocks in enumerate(np.split(shuffled, np.cumsum(num_blocks)[:-1])):
            tables[row, : len(blocks)] = blocks
        positions = [np.arange(before, before + now) for before, now in sequences]
        slots = [tables[row, p // block_size] * block_size + p % block_size for row, p in enumerate(positions)]
        self.positions = np.concatenate(positions)
        self.num_tokens = len(self.positions)
        spec = LayerSpec(self.heads.num_kv_heads, self.heads.head_dim, self.heads.head_dim)
        # One block more than anybody owns: no kernel may touch it.
        self.cache = LayerKVCache(spec, int(num_blocks.sum()) + 2, block_size, dtype, self.device)
        self.cache.keys.copy_(self.random(*self.cache.keys.shape))
        self.cache.values.copy_(self.random(*self.cache.values.shape))
        self.metadata: AttentionMetadata = build_attention_metadata(
            query_start_loc=np.cumsum([0, *(now for _, now in sequences)]),
            seq_lens=seq_lens,
            prompt_lens=seq_lens,
            block_tables=tables,
            slot_mapping=np.concatenate(slots),
            block_size=block_size,
            device=self.device,
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.device, self.dtype)

    def weight(self, size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=self._generator)).to(self.device)

    def close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = TOLERANCES[self.dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def check_paged_attention(kernels: Kernels, batch: Batch, options: AttentionOptions) -> None:
    """The query is a part of qkv, as in a decoder."""
    heads = batch.heads
    qkv = batch.random(batch.num_tokens, heads.row_size)
    query = qkv[:, : heads.num_heads * heads.head_dim].view(batch.num_tokens, heads.num_heads, heads.head_dim)
    found, expected = torch.full_like(query.contiguous(), float("nan")), torch.empty_like(query.contiguous())
    kernels.paged_attention(query, batch.cache, batch.metadata, options, found)
    REFERENCE.paged_attention(query, batch.cache, batch.metadata, options, expected)
    batch.close(found, expected)


def check_rope_and_cache(kernels: Kernels, batch: Batch, rotary_half: int, *, has_qk_norm: bool) -> None:
    """With a number that is not finite among the values, and neighbours in the cache that must stay as they are."""
    heads = batch.heads
    qkv = batch.random(batch.num_tokens, heads.row_size)
    qkv[0, -1] = float("inf")
    angles = torch.from_numpy(batch.positions)[:, None].float() * torch.rand(1, rotary_half)
    cos, sin = angles.cos().to(batch.device), angles.sin().to(batch.device)
    norm = QKNorm(batch.weight(heads.head_dim), batch.weight(heads.head_dim), 1e-6) if has_qk_norm else None
    keys, values = batch.cache.keys.clone(), batch.cache.values.clone()
    expected = qkv.clone()
    REFERENCE.rope_and_cache(expected, cos, sin, batch.cache, batch.metadata.slot_mapping, norm)
    expected_keys, expected_values = batch.cache.keys.clone(), batch.cache.values.clone()
    batch.cache.keys.copy_(keys)
    batch.cache.values.copy_(values)
    kernels.rope_and_cache(qkv, cos, sin, batch.cache, batch.metadata.slot_mapping, norm)
    num_query_features = heads.num_heads * heads.head_dim
    batch.close(qkv[:, :num_query_features], expected[:, :num_query_features])
    batch.close(batch.cache.keys, expected_keys)
    batch.close(batch.cache.values, expected_values)


def check_add_rms_norm(kernels: Kernels, batch: Batch, num_features: int, *, has_x: bool) -> None:
    rows = batch.random(batch.num_tokens, num_features)
    x = batch.random(batch.num_tokens, num_features) if has_x else None
    weight = batch.weight(num_features)
    for residual in (rows, rows.float() / 3):
        expected_residual, expected, found = residual.clone(), torch.empty_like(rows), torch.empty_like(rows)
        REFERENCE.add_rms_norm(expected_residual, x, weight, 1e-5, expected)
        kernels.add_rms_norm(residual, x, weight, 1e-5, found)
        batch.close(residual, expected_residual)
        batch.close(found, expected)
        if not has_x and residual.dtype == rows.dtype:
            kernels.add_rms_norm(residual, None, weight, 1e-5, residual)
            batch.close(residual, expected)


def check_act_mul(kernels: Kernels, batch: Batch, num_features: int, activation: Activation) -> None:
    gate_up = batch.random(batch.num_tokens, 2 * num_features) * 3
    found, expected = batch.random(batch.num_tokens, num_features), batch.random(batch.num_tokens, num_features)
    kernels.act_mul(gate_up, activation, found)
    REFERENCE.act_mul(gate_up, activation, expected)
    batch.close(found, expected)
