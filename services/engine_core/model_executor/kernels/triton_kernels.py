"""The kernels in Triton, for every GPU that Triton knows; in its interpreter also for tests without one.

Imports triton: only to be imported when these kernels are chosen.
"""

from __future__ import annotations

import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata
from engine_core.model_executor.kernels import triton_elementwise, triton_prefill, triton_rope_cache
from engine_core.model_executor.kernels.interface import Activation, QKNorm
from engine_core.model_executor.kernels.triton_decode import DecodeAttention


class TritonKernels:
    """Implements `Kernels`.

    Batch-invariant: one kernel with one size of tiles computes every query, and no context is cut, so that a query's
    result does not depend on what else is in the batch, nor on whether it came alone or as a part of a prompt.
    """

    name = "triton"

    def __init__(self, num_processors: int, *, is_batch_invariant: bool = False) -> None:
        self._decode_attention = DecodeAttention(num_processors)
        self._is_batch_invariant = is_batch_invariant

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        triton_elementwise.add_rms_norm(residual, x, weight, eps, out)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LayerKVCache,
        slot_mapping: torch.Tensor,
        qk_norm: QKNorm | None,
    ) -> None:
        triton_rope_cache.rope_and_cache(qkv, cos, sin, cache, slot_mapping, qk_norm)

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        if not self._is_batch_invariant:
            self._decode_attention(query, cache, metadata, options, out)
        if self._is_batch_invariant or metadata.max_query_len > 1:
            triton_prefill.prefill_attention(query, cache, metadata, options, out, has_decodes=self._is_batch_invariant)

    def act_mul(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        triton_elementwise.act_mul(gate_up, activation, out)
