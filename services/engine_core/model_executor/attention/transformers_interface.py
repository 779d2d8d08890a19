"""Registers stepwire's attention with transformers, so that its models call it in each layer.

The context of the forward pass travels as a keyword argument of the model, which hands it down to its layers; there is
no global state. Owner: the busy-loop thread, inside the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from engine_core.model_executor.attention.context import AttentionContext
from engine_core.model_executor.attention.core import AttentionOptions

# Not among transformers' mask functions, so its models build no masks for it.
NAME = "stepwire_paged"


class UnsupportedAttentionError(Exception):
    """A layer asks for something stepwire's attention does not do."""


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers. Repeating it changes nothing."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    attention_context: AttentionContext | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers: query [1, H, T, D], key [1, K, T, D], value [1, K, T, V] -> [1, T, H, V]."""
    if attention_context is None:
        raise UnsupportedAttentionError("the model does not hand attention_context down to its layers")
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedAttentionError("the model brings its own attention mask or position bias")
    layer_idx = getattr(module, "layer_idx", None)
    if layer_idx is None:
        raise UnsupportedAttentionError("an attention layer does not know its index")
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
    )
    output = attention_context.attend(
        int(layer_idx), _tokens_first(query), _tokens_first(key), _tokens_first(value), options
    )
    return output[None], None


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] -> [T, H, D]"""
    return tensor[0].transpose(0, 1)
