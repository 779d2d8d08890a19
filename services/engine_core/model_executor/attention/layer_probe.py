"""Asks a loaded model about its attention layers by running it once without a cache.

Owner: the thread that starts the engine. The answers size the KV cache: what the layers really hand over, not what a
config says under one of many names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine_core.model_executor.attention.core import AttentionOptions, attend, heads_first, visible_keys
from engine_core.model_executor.attention.kv_cache import LayerSpec


@dataclass(slots=True)
class LayerProbe:
    """The attention context of one sequence without a past; records each layer that calls."""

    specs: dict[int, LayerSpec] = field(default_factory=dict)
    options: dict[int, AttentionOptions] = field(default_factory=dict)

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self.specs[layer_idx] = LayerSpec(num_kv_heads=key.shape[1], key_dim=key.shape[2], value_dim=value.shape[2])
        self.options[layer_idx] = options
        positions = torch.arange(query.shape[0], device=query.device)
        mask = visible_keys(positions, key.shape[0], options.sliding_window)[None, None]
        return attend(heads_first(query), heads_first(key), heads_first(value), mask, options)[0].transpose(0, 1)
