"""What the model runner asks of a model, whoever computes it."""

from __future__ import annotations

from typing import Protocol

import torch

from engine_core.model_executor.attention.kv_cache import LayerSpec
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.kv_cache_groups import LayerGroup
from engine_core.model_executor.model_weights import ModelWeights


class ModelBackend(Protocol):
    """A loaded model behind one call: a flattened batch in, logits out."""

    # For the log and for Ready.
    name: str
    weights: ModelWeights
    is_causal: bool
    vocab_size: int
    # Features of a hidden state.
    hidden_size: int
    # By index of the layer.
    layer_specs: dict[int, LayerSpec]
    layer_groups: tuple[LayerGroup, ...]

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor, context: PagedAttention
    ) -> torch.Tensor:
        """input_ids [T], positions [T], logits_indices [N] into T -> logits [N, vocab_size] in the model's dtype."""

    def logits(self, logits_indices: torch.Tensor) -> torch.Tensor:
        """logits_indices [N] into the tokens of the latest `forward` -> logits [N, vocab_size]; no layer runs again."""

    def hidden_states(self) -> torch.Tensor:
        """Those of all tokens of the latest `forward`, behind the final norm, [T, hidden_size]; until the next one."""

    def move_weights(self, device: torch.device) -> int:
        """Move parameters and buffers in place; returns the bytes that changed their device."""
