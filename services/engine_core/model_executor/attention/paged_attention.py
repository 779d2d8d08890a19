"""The attention context of one step for a transformers model: first the write into the cache, then attention over it.

Owner: the thread that runs the model. Writes only the slots of this step's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.kernels.torch_kernels import TorchKernels

_REFERENCE = TorchKernels()


@dataclass(slots=True)
class PagedAttention:
    """Caches and metadata by index of the layer. Layers of one group share their metadata."""

    caches: Mapping[int, LayerKVCache]
    metadata: Mapping[int, AttentionMetadata]
    kernels: Kernels = _REFERENCE

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        cache, metadata = self.caches[layer_idx], self.metadata[layer_idx]
        # First the write: a chunk's own tokens are among the keys it reads.
        cache.write(key, value, metadata.slot_mapping)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        # The kernels know causal heads of one size; the reference knows all.
        is_common = options.is_causal and options.sinks is None and key.shape[2] == value.shape[2]
        kernels = self.kernels if is_common else _REFERENCE
        # Some models join a rotated part of the heads with the rest of them, in an order of their own.
        kernels.paged_attention(query.contiguous(), cache, metadata, options, output)
        return output
