"""Which rows decode together, and what is padded to what."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_executor.attention import torch_batches as module
from engine_core.model_executor.attention.metadata import AttentionMetadata, build_attention_metadata


def build(query_lens: list[int], seq_lens: list[int], block_size: int = 4) -> AttentionMetadata:
    num_blocks = max(-(-length // block_size) for length in seq_lens)
    tables = np.arange(len(seq_lens) * num_blocks).reshape(len(seq_lens), num_blocks) + 1
    return build_attention_metadata(
        query_start_loc=np.cumsum([0, *query_lens]),
        seq_lens=np.array(seq_lens),
        prompt_lens=np.array(seq_lens),
        block_tables=tables,
        slot_mapping=np.zeros(sum(query_lens), dtype=np.int64),
        block_size=block_size,
        device=torch.device("cpu"),
    )


def test_decodes_and_prefills_are_told_apart_by_their_query_tokens():
    result = build([1, 5, 1, 2], [9, 5, 10, 8])
    assert [group.token_indices.tolist() for group in result.decode_groups] == [[0, 6]]
    assert [(row.start, row.end, row.seq_len) for row in result.prefill_rows] == [(1, 6, 5), (7, 9, 8)]
    assert [row.block_table.tolist() for row in result.prefill_rows] == [[4, 5], [10, 11]]


def test_a_prompt_of_one_token_decodes():
    assert build([1], [1]).decode_groups[0].seq_lens.tolist() == [1]


def test_a_long_row_does_not_widen_short_ones():
    result = build([1, 1, 1], [4, 400, 8])
    assert [(group.token_indices.tolist(), group.block_tables.shape[1]) for group in result.decode_groups] == [
        ([0, 2], 2),
        ([1], 100),
    ]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_every_decode_row_is_in_one_group_and_padding_is_bounded(seq_lens):
    result = build([1] * len(seq_lens), seq_lens)
    rows = [index for group in result.decode_groups for index in group.token_indices.tolist()]
    assert sorted(rows) == list(range(len(seq_lens)))
    for group in result.decode_groups:
        needed = [-(-length // 4) for length in group.seq_lens.tolist()]
        assert max(needed) == group.block_tables.shape[1] <= 2 * min(needed)


def test_gathered_slots_of_a_group_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MAX_GROUP_SLOTS", 64)
    result = build([1] * 8, [16] * 8)
    assert all(group.block_tables.numel() * 4 <= 64 for group in result.decode_groups)
    assert sum(len(group.seq_lens) for group in result.decode_groups) == 8
    # One row may exceed the bound: it can not be split.
    assert len(build([1], [500]).decode_groups) == 1
