"""Paged attention of one query a sequence, in Triton: the heads of a group are one tile, so that each key is read once.

Few long sequences are cut along their contexts, so that all of the device has work; a second kernel joins the parts.
How many parts there are depends on the shape of the launch alone, so that a launch can be captured in a graph.
Sequences with more queries are left to `triton_prefill.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata
from engine_core.model_executor.kernels.triton_tiles import key_offsets, softmax_round

# A tensor core takes no fewer rows.
_FEWEST_ROWS = 16
# A part shorter than this costs more to join than it saves.
_FEWEST_KEYS_OF_A_PART = 256
# Per multiprocessor: enough to hide the latency of memory.
_PROGRAMS_PER_PROCESSOR = 4


class DecodeAttention:
    """Launches the kernels; owns the memory of the parts, which is as large as any launch needs from the beginning."""

    def __init__(self, num_processors: int) -> None:
        self._max_programs = num_processors * _PROGRAMS_PER_PROCESSOR
        # By floats of one program: the model's layers have one size, or very few.
        self._parts: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        num_heads, head_dim = query.shape[1:]
        num_kv_heads, num_sequences = cache.keys.shape[1], len(metadata.seq_lens)
        num_parts = self._num_parts(num_sequences * num_kv_heads, metadata.max_seq_len)
        parts = self._memory(num_heads // num_kv_heads * (head_dim + 2), query.device) if num_parts > 1 else query
        group, wide = num_heads // num_kv_heads, head_dim > 128
        _decode[(num_sequences, num_kv_heads, num_parts)](
            query, cache.keys, cache.values, metadata.block_tables, metadata.seq_lens, metadata.query_start_loc,
            out, parts, query.stride(0), out.stride(0), cache.keys.stride(0), cache.keys.stride(1),
            metadata.block_tables.stride(0), num_parts, options.scale, options.softcap or 0.0,
            options.sliding_window or 0,
            GROUP=group, ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(group)), D=head_dim,
            D_TILE=max(16, triton.next_power_of_2(head_dim)), KEYS=32 if wide else 64,
            BLOCK_SIZE=metadata.block_size, HAS_PARTS=num_parts > 1, LEAST=_FEWEST_KEYS_OF_A_PART,
            HAS_WINDOW=options.sliding_window is not None, HAS_SOFTCAP=options.softcap is not None,
            num_warps=4, num_stages=2 if wide else 3,
        )  # fmt: skip
        if num_parts > 1:
            _join[(num_sequences, num_heads)](
                parts, out, metadata.query_start_loc, out.stride(0), num_kv_heads, num_parts,
                GROUP=group, D=head_dim, D_TILE=triton.next_power_of_2(head_dim), num_warps=1,
            )  # fmt: skip

    def _num_parts(self, num_programs: int, max_seq_len: int) -> int:
        return max(1, min(-(-max_seq_len // _FEWEST_KEYS_OF_A_PART), self._max_programs // num_programs))

    def _memory(self, floats_of_a_program: int, device: torch.device) -> torch.Tensor:
        parts = self._parts.get(floats_of_a_program)
        if parts is None:
            parts = torch.empty(self._max_programs * floats_of_a_program, dtype=torch.float32, device=device)
            self._parts[floats_of_a_program] = parts
        return parts


# What differs from step to step is not specialised: no step may compile anything.
_VARYING = ["table_stride", "num_parts", "window"]


@triton.jit(do_not_specialize=_VARYING)
def _decode(
    query, key_cache, value_cache, block_tables, seq_lens, query_start_loc, out, parts,
    query_stride, out_stride, block_stride, head_stride, table_stride, num_parts, scale, softcap, window,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_PARTS: tl.constexpr, LEAST: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Program (sequence, key/value head, part of the context)."""
    sequence, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start_loc + sequence)
    if tl.load(query_start_loc + sequence + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + sequence)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, seq_len - window)
    # Whole tiles from a multiple of the tile, whatever the window: a key is always at the same place of its tile.
    begin, end = first // KEYS * KEYS, seq_len
    if HAS_PARTS:
        size = tl.cdiv(tl.maximum(LEAST, tl.cdiv(seq_len - begin, num_parts)), KEYS) * KEYS
        begin += part * size
        end = tl.minimum(seq_len, begin + size)

    rows, features = tl.arange(0, ROWS), tl.arange(0, D_TILE)
    is_row = (rows < GROUP)[:, None] & (features < D)[None, :]
    within = (head * GROUP + rows)[:, None] * D + features[None, :]
    queries = tl.load(query + token.to(tl.int64) * query_stride + within, mask=is_row, other=0.0)
    state_max = tl.full([ROWS], float("-inf"), tl.float32)
    state_sum = tl.zeros([ROWS], tl.float32)
    state_values = tl.zeros([ROWS, D_TILE], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = (keys >= first) & (keys < end)
        offsets = key_offsets(table, head, keys, is_key, block_stride, head_stride, BLOCK_SIZE, D)
        state_max, state_sum, state_values = softmax_round(
            queries, key_cache, value_cache, offsets, is_key[None, :] & (rows < GROUP)[:, None],
            state_max, state_sum, state_values, scale, softcap, D, D_TILE, HAS_SOFTCAP,
        )  # fmt: skip
    if HAS_PARTS:
        program = (sequence * tl.num_programs(1) + head) * num_parts + part
        mine = parts + program.to(tl.int64) * (GROUP * (D + 2)) + rows * (D + 2)
        tl.store(mine[:, None] + features[None, :], state_values, mask=is_row)
        tl.store(mine + D, state_max, mask=rows < GROUP)
        tl.store(mine + D + 1, state_sum, mask=rows < GROUP)
    else:
        # Rows without a head have seen nothing.
        result = state_values / tl.where(state_sum == 0, 1.0, state_sum)[:, None]
        tl.store(out + token.to(tl.int64) * out_stride + within, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["num_parts"])
def _join(
    parts, out, query_start_loc, out_stride, num_kv_heads, num_parts,
    GROUP: tl.constexpr, D: tl.constexpr, D_TILE: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head): the softmax over all parts of its context. A part without keys has the maximum -inf."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_loc + sequence)
    if tl.load(query_start_loc + sequence + 1) - token != 1:
        return
    features = tl.arange(0, D_TILE)
    program = ((sequence * num_kv_heads + head // GROUP) * num_parts).to(tl.int64)
    part = parts + program * (GROUP * (D + 2)) + head % GROUP * (D + 2)
    # The first part has keys, unless the sequence is empty.
    state_max = tl.load(part + D)
    state_sum = tl.load(part + D + 1)
    values = tl.load(part + features, mask=features < D, other=0.0)
    for _ in range(1, num_parts):
        part += GROUP * (D + 2)
        part_max = tl.load(part + D)
        new_max = tl.maximum(state_max, part_max)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink, weight = tl.exp2(state_max - base), tl.exp2(part_max - base)
        state_sum = state_sum * shrink + tl.load(part + D + 1) * weight
        values = values * shrink + tl.load(part + features, mask=features < D, other=0.0) * weight
        state_max = new_max
    result = values / tl.where(state_sum == 0, 1.0, state_sum)
    at = out + token.to(tl.int64) * out_stride + head * D + features
    tl.store(at, result.to(out.dtype.element_ty), mask=features < D)
