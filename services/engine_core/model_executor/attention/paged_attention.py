"""Paged attention in plain torch: the correctness reference of every faster kernel, on any device.

Owner: the busy-loop thread, inside the forward pass. Writes only the slots of this step's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine_core.model_executor.attention.core import AttentionOptions, attend, heads_first, visible_keys
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata, DecodeGroup, PrefillRow


@dataclass(slots=True)
class PagedAttention:
    """The attention context of one step, by index of the layer. Layers of one group share their metadata."""

    caches: Mapping[int, LayerKVCache]
    metadata: Mapping[int, AttentionMetadata]

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        cache, metadata = self.caches[layer_idx], self.metadata[layer_idx]
        # First the write: a chunk's own tokens are among the keys it reads.
        cache.write(key, value, metadata.slot_mapping)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        for group in metadata.decode_groups:
            output[group.token_indices] = _decode(query[group.token_indices], cache, group, options)
        for row in metadata.prefill_rows:
            tokens = slice(row.start, row.end)
            output[tokens] = _prefill(query[tokens], key[tokens], value[tokens], cache, row, options)
        return output


def _decode(query: torch.Tensor, cache: LayerKVCache, group: DecodeGroup, options: AttentionOptions) -> torch.Tensor:
    """query [R, H, D] -> [R, H, V]"""
    keys, values = cache.gather(group.block_tables)
    mask = group.masks.get(options.sliding_window)
    if mask is None:
        mask = visible_keys(group.seq_lens - 1, keys.shape[1], options.sliding_window)[:, None, None]
        group.masks[options.sliding_window] = mask
    output = attend(query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), mask, options)
    return output[:, :, 0]


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: LayerKVCache,
    row: PrefillRow,
    options: AttentionOptions,
) -> torch.Tensor:
    """query [L, H, D], key and value of the same tokens -> [L, H, V]"""
    num_queries = row.end - row.start
    is_whole = num_queries == row.seq_len
    if not is_whole:
        key, value = (gathered[: row.seq_len] for gathered in cache.gather(row.block_table))
    mask = None
    has_window = options.sliding_window is not None and options.sliding_window < row.seq_len
    if not is_whole or has_window or not options.is_causal:
        mask = _prefill_mask(row, query.device, options)
    return attend(heads_first(query), heads_first(key), heads_first(value), mask, options)[0].transpose(0, 1)


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
