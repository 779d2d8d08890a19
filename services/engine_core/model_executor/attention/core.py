"""Attention of queries over gathered keys and values: the arithmetic, without any paging.

Owner: the busy-loop thread, inside the forward pass. Pure functions of their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

# Queries of one round of the explicit path, which holds all their scores at once.
_QUERIES_PER_ROUND = 256


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What one layer asks of attention. `sliding_window` W: a query at position p sees keys p - W + 1 .. p."""

    scale: float
    sliding_window: int | None = None
    # Scores become softcap * tanh(score / softcap).
    softcap: float | None = None
    # [H]; one extra logit for each head that takes part in the softmax and carries no value.
    sinks: torch.Tensor | None = None
    # False: besides, all tokens of a prompt see each other.
    is_causal: bool = True


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """query [R, H, L, D], key [R, K, S, D], value [R, K, S, V] -> [R, H, L, V]; H is a multiple of K.

    mask: bool, [R or 1, 1, L, S], true = visible; None = causal, with L == S.
    """
    if options.softcap is not None or options.sinks is not None:
        return _attend_explicitly(query, key, value, mask, options)
    if query.shape[2] == 1 and mask is not None:
        # One query: the heads of a group take the place of the queries, so that no key is copied for them.
        num_kv_heads = key.shape[1]
        grouped = query.view(query.shape[0], num_kv_heads, -1, query.shape[3])
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=options.scale)
        return output.reshape(*query.shape[:3], value.shape[3])
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=options.scale, enable_gqa=True
    )


def heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """[L, H, D] of one sequence -> [1, H, L, D], as `attend` takes it."""
    return tensor.transpose(0, 1)[None]


def visible_keys(query_positions: torch.Tensor, num_keys: int, sliding_window: int | None) -> torch.Tensor:
    """Causal visibility of keys 0 .. num_keys - 1: bool [..., num_keys] for query positions [...]."""
    keys = torch.arange(num_keys, device=query_positions.device)
    positions = query_positions[..., None]
    visible = keys <= positions
    if sliding_window is not None:
        visible &= keys > positions - sliding_window
    return visible


def _attend_explicitly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """The fused operator has neither softcap nor sinks. Works in float32."""
    if mask is None:
        positions = torch.arange(key.shape[2], device=key.device)
        mask = visible_keys(positions, key.shape[2], None)[None, None]
    queries, masks = (torch.split(tensor, _QUERIES_PER_ROUND, dim=2) for tensor in (query, mask))
    outputs = [_attend_round(part, key, value, visible, options) for part, visible in zip(queries, masks, strict=True)]
    return torch.cat(outputs, dim=2)


def _attend_round(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    grouped = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])
    # [R, K, G, L, S]
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)).float() * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, key.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.matmul(weights.to(value.dtype), value[:, :, None]).flatten(1, 2)
