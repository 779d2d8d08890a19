"""Paged attention in plain torch: keys and values are gathered from the cache, then fused attention over them.

Owner: the thread that runs the model. Reads the cache only.
"""

from __future__ import annotations

import torch

from engine_core.model_executor.attention.core import AttentionOptions, attend, heads_first, visible_keys
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.torch_batches import DecodeGroup, PrefillRow


def attend_decodes(
    query: torch.Tensor, cache: LayerKVCache, group: DecodeGroup, options: AttentionOptions
) -> torch.Tensor:
    """query [R, H, D] -> [R, H, V]"""
    keys, values = cache.gather(group.block_tables)
    mask = group.masks.get(options.sliding_window)
    if mask is None:
        mask = visible_keys(group.seq_lens - 1, keys.shape[2], options.sliding_window)[:, None, None]
        group.masks[options.sliding_window] = mask
    return attend(query[:, :, None], keys, values, mask, options)[:, :, 0]


def attend_prefill(
    query: torch.Tensor, cache: LayerKVCache, row: PrefillRow, options: AttentionOptions
) -> torch.Tensor:
    """query [L, H, D] of one sequence -> [L, H, V]"""
    keys, values = (gathered[None, :, : row.seq_len] for gathered in cache.gather(row.block_table))
    is_whole = row.end - row.start == row.seq_len
    has_window = options.sliding_window is not None and options.sliding_window < row.seq_len
    mask = None
    if not is_whole or has_window or not options.is_causal:
        mask = _prefill_mask(row, query.device, options)
    return attend(heads_first(query), keys, values, mask, options)[0].transpose(0, 1)


def _prefill_mask(row: PrefillRow, device: torch.device, options: AttentionOptions) -> torch.Tensor:
    key = options.sliding_window, options.is_causal
    mask = row.masks.get(key)
    if mask is None:
        positions = torch.arange(row.seq_len - (row.end - row.start), row.seq_len, device=device)
        visible = visible_keys(positions, row.seq_len, options.sliding_window)
        if not options.is_causal:
            # Its prompt is computed in one step, so that later tokens are in this row only after a preemption.
            visible[:, : row.prompt_len] = True
        mask = row.masks[key] = visible[None, None]
    return mask
