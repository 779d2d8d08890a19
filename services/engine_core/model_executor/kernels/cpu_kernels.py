"""The kernels in C++, for one instruction set of this machine's CPU.

Owner: the thread that runs the model. Per call nothing is done here but to name the arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata
from engine_core.model_executor.kernels.cpu_build import INSTRUCTION_SETS
from engine_core.model_executor.kernels.few_rows import FewRows
from engine_core.model_executor.kernels.int8_weights import Int8Products
from engine_core.model_executor.kernels.interface import Activation, QKNorm

# Numbers as in csrc/kernels.h.
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class CpuKernels:
    """Implements `Kernels` for float32 and bfloat16."""

    def __init__(self, operators: Any, instruction_set: str) -> None:
        self.name = instruction_set
        self._set = INSTRUCTION_SETS.index(instruction_set)
        # The overloads themselves: asking the namespace for them costs as much as a small kernel.
        self._add_rms_norm = operators.add_rms_norm.default
        self._rope_and_cache = operators.rope_and_cache.default
        self._paged_attention = operators.paged_attention.default
        self._act_mul = operators.act_mul.default
        self._operators = operators
        self.few_rows = FewRows(operators, instruction_set)
        # None where the CPU has no instructions for it.
        self.int8 = Int8Products(operators, instruction_set) if operators.has_int8(self._set) else None

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        self._add_rms_norm(residual, x, weight, eps, out, self._set)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LayerKVCache,
        slot_mapping: torch.Tensor,
        qk_norm: QKNorm | None,
    ) -> None:
        query_norm, key_norm, eps = (None, None, 0.0)
        if qk_norm is not None:
            query_norm, key_norm, eps = qk_norm.query_weight, qk_norm.key_weight, qk_norm.eps
        self._rope_and_cache(
            qkv, cos, sin, cache.keys, cache.values, slot_mapping, query_norm, key_norm, eps, self._set
        )

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        self._paged_attention(
            query,
            cache.keys,
            cache.values,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            options.scale,
            options.sliding_window or 0,
            options.softcap or 0.0,
            out,
            self._set,
        )

    def act_mul(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        self._act_mul(gate_up, _ACTIVATIONS[activation], out, self._set)

    def new_decoder_layers(self) -> Any:
        """An object that computes whole layers (csrc/layers.cpp), without any as yet."""
        return getattr(torch.classes, self._operators.name).DecoderLayers(self._set)

    def max_tokens_of_layers(self, dtype: torch.dtype) -> int:
        """With more of them one operation after the other may be faster."""
        return int(self._operators.layers_rows(dtype == torch.bfloat16, self._set))

    def activation_number(self, activation: Activation) -> int:
        """As `new_decoder_layers` takes it."""
        return _ACTIVATIONS[activation]
