"""What a set of kernels does: the operations of a decoder layer that are not matrix products.

Every set writes its results into tensors it is given, so that a step allocates nothing and can be captured in a graph.
All sets agree with `torch_kernels.py`, the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata

# gelu_tanh: the approximation with tanh, as Gemma uses it.
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms over each head of queries and keys, before they are rotated."""

    # float32 [D] each.
    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float


class Kernels(Protocol):
    """T tokens, n features, H query heads, K key/value heads of size D. Rows are contiguous unless said otherwise."""

    name: str

    def add_rms_norm(
        self, residual: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """residual += x, if there is one; out = residual / rms(residual) * weight. All [T, n]; weight float32 [n].

        x and out are of one type; the residual is of that type or float32. The sum is rounded to the residual's type
        before it is normalised; norms are computed in float32. Without x, out may be the residual itself.
        """

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LayerKVCache,
        slot_mapping: torch.Tensor,
        qk_norm: QKNorm | None,
    ) -> None:
        """Rotate the queries of qkv [T, (H + 2K) * D] in place; rotate its keys and store them and the values at slots.

        cos, sin: float32 [T, R]; feature i < R pairs with feature i + R of its head, and those from 2R on stay as they
        are (R = 0: no rotation). Numbers that are not finite are stored as 0. The keys in qkv are undefined afterwards.
        """

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        """Causal attention without sinks over what the cache holds, this step's too: query [T, H, D] -> out [T, H, D].

        Prompts, chunks and decodes alike. A query's tokens may be apart by any stride (a part of qkv); heads are not.
        """

    def act_mul(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """gate_up [T, 2n] -> out [T, n] = activation(gate) * up, computed in float32."""
