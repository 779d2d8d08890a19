"""What a layer's attention call reaches: the seam between the transformers models and the ways to run attention.

Owner: the busy-loop thread. Holds no state.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine_core.model_executor.attention.core import AttentionOptions


class AttentionContext(Protocol):
    """One forward pass, as its attention layers see it."""

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """query [T, H, D], key [T, K, D] and value [T, K, V] of the step's T tokens -> [T, H, V]."""
