"""Paged attention of prompts and chunks in Triton: tiles of queries with all heads of a group, over tiles of keys.

Tiles of keys that no query of the tile may see are not visited: those after it, and those before its sliding window.
A tile finds its sequence by itself, so that a launch needs nothing from the host but the number of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata
from engine_core.model_executor.kernels.triton_tiles import key_offsets, softmax_round


def prefill_attention(
    query: torch.Tensor,
    cache: LayerKVCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    out: torch.Tensor,
    *,
    has_decodes: bool,
) -> None:
    """Attention of all sequences; without `has_decodes`, of those with more than one query."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, num_sequences = cache.keys.shape[1], len(metadata.seq_lens)
    group = num_heads // num_kv_heads
    # Fixed by the model alone: with another tile a sum might be made in another order. float32 has no tensor cores,
    # and large tiles would leave the registers.
    is_small, is_float32 = head_dim <= 128, query.dtype == torch.float32
    rows = 32 if is_float32 else 128 if is_small else 64
    rows = max(rows, triton.next_power_of_2(group))
    # A sequence begins a tile of its own, so that there is at most one more tile for each of them.
    num_tiles = len(query) // (rows // group) + num_sequences
    _prefill[(num_tiles, num_kv_heads)](
        query, cache.keys, cache.values, metadata.block_tables, metadata.seq_lens, metadata.query_start_loc, out,
        query.stride(0), out.stride(0), cache.keys.stride(0), cache.keys.stride(1), metadata.block_tables.stride(0),
        num_sequences, options.scale, options.softcap or 0.0, options.sliding_window or 0,
        GROUP=group, ROWS=rows, D=head_dim, D_TILE=max(16, triton.next_power_of_2(head_dim)),
        KEYS=64 if is_small and not is_float32 else 32, BLOCK_SIZE=metadata.block_size, HAS_DECODES=has_decodes,
        HAS_WINDOW=options.sliding_window is not None, HAS_SOFTCAP=options.softcap is not None,
        num_warps=8 if rows * head_dim > 128 * 64 else 4, num_stages=2,
    )  # fmt: skip


@triton.jit
def _sequence_of(tile, query_start_loc, num_sequences, QUERIES: tl.constexpr):
    """The sequence of a tile: the last one whose first tile, query_start_loc[i] // QUERIES + i, is not behind it."""
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "window"])
def _prefill(
    query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, out,
    query_stride, out_stride, block_stride, head_stride, table_stride, num_sequences, scale, softcap, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_DECODES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Program (tile of queries, key/value head)."""
    QUERIES: tl.constexpr = ROWS // GROUP
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(tile, query_start_loc, num_sequences, QUERIES)
    begin = tl.load(query_start_loc + sequence)
    num_queries = tl.load(query_start_loc + sequence + 1) - begin
    first_query = (tile - begin // QUERIES - sequence) * QUERIES
    if first_query >= num_queries:
        return
    if (not HAS_DECODES) & (num_queries == 1):
        return
    num_before = tl.load(seq_lens + sequence) - num_queries

    rows, features = tl.arange(0, ROWS), tl.arange(0, D_TILE)
    queries = first_query + rows // GROUP
    is_row = (rows < QUERIES * GROUP) & (queries < num_queries)
    positions = num_before + queries
    heads = head * GROUP + rows % GROUP
    tokens = (begin + queries).to(tl.int64)
    mask = is_row[:, None] & (features < D)[None, :]
    within = heads[:, None] * D + features[None, :]
    vectors = tl.load(query + tokens[:, None] * query_stride + within, mask=mask, other=0.0)
    state_max = tl.full([ROWS], float("-inf"), tl.float32)
    state_sum = tl.zeros([ROWS], tl.float32)
    state_values = tl.zeros([ROWS, D_TILE], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(0, num_before + first_query - window + 1) // KEYS * KEYS
    end = num_before + tl.minimum(num_queries, first_query + QUERIES)
    for start in range(first_key, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_visible = is_row[:, None] & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            is_visible &= keys[None, :] > positions[:, None] - window
        offsets = key_offsets(table, head, keys, keys < end, block_stride, head_stride, BLOCK_SIZE, D)
        state_max, state_sum, state_values = softmax_round(
            vectors, key_cache, value_cache, offsets, is_visible,
            state_max, state_sum, state_values, scale, softcap, D, D_TILE, HAS_SOFTCAP,
        )  # fmt: skip
    # Rows without a query have seen nothing.
    result = state_values / tl.where(state_sum == 0, 1.0, state_sum)[:, None]
    tl.store(out + tokens[:, None] * out_stride + within, result.to(out.dtype.element_ty), mask=mask)
