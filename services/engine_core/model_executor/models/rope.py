"""Rotary embeddings: the frequencies that the loaded module has worked out from its config, whatever their scaling."""

from __future__ import annotations

from typing import Any

import torch


class Rope:
    """One kind of rotation; a model may have one for each type of layer."""

    def __init__(self, inv_freq: torch.Tensor, attention_scaling: float) -> None:
        # float32 [R]
        self.inv_freq = inv_freq.float().contiguous()
        self.attention_scaling = attention_scaling

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] -> cos, sin: float32 [T, R] each."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos, sin


def rope_of(rotary_embedding: Any, layer_type: str) -> Rope:
    """The rotation of the layers of that type, from transformers' module."""
    prefix = f"{layer_type}_" if hasattr(rotary_embedding, f"{layer_type}_inv_freq") else ""
    return Rope(
        getattr(rotary_embedding, f"{prefix}inv_freq"), float(getattr(rotary_embedding, f"{prefix}attention_scaling"))
    )


def no_rope(device: torch.device) -> Rope:
    """Of layers that do not rotate."""
    return Rope(torch.empty(0, device=device), 1.0)
