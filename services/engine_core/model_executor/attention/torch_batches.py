"""How the torch reference cuts a step's batch: decodes of similar length together, prompts one by one.

Owner: the thread that runs the model. Values only; never reads or writes the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

# Gathered KV slots of one group of decode rows: bounds the temporary copy of keys and values.
_MAX_GROUP_SLOTS = 1 << 17


@dataclass(slots=True)
class DecodeGroup:
    """Rows of one query token each and of similar length, so that padding them to one length costs little."""

    # Positions of the rows' tokens in the flattened batch, [R].
    token_indices: torch.Tensor
    # [R, N]; entries past a row's last block are 0, the null block.
    block_tables: torch.Tensor
    # Known tokens of each row, this step's included, [R].
    seq_lens: torch.Tensor
    # Visible slots by sliding window, [R, 1, 1, N * block_size] each: made by the first layer of a kind, for all of it.
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class PrefillRow:
    """One sequence with several query tokens: a prompt, or a chunk of one."""

    # The row's tokens are [start, end) of the flattened batch.
    start: int
    end: int
    # Known tokens, this step's included; more than end - start when a part was computed before.
    seq_len: int
    # [ceil(seq_len / block_size)]
    block_table: torch.Tensor
    # Those of the prompt see each other in a layer that is not causal.
    prompt_len: int
    # By sliding window, as in DecodeGroup, and by whether the layer is causal; [1, 1, end - start, seq_len] each.
    masks: dict[tuple[int | None, bool], torch.Tensor] = field(default_factory=dict)


def decode_groups(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    device: torch.device,
) -> list[DecodeGroup]:
    """The sequences of one token each; arguments as in `build_attention_metadata`."""
    rows_of_one = np.flatnonzero(np.diff(query_start_loc) == 1)
    return [
        DecodeGroup(
            token_indices=torch.from_numpy(query_start_loc[rows]).to(device),
            block_tables=torch.from_numpy(block_tables[rows, :num_blocks]).to(device),
            seq_lens=torch.from_numpy(seq_lens[rows]).to(device),
        )
        for rows, num_blocks in _similar_lengths(rows_of_one, seq_lens, block_size)
    ]


def prefill_rows(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    prompt_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    device: torch.device,
) -> list[PrefillRow]:
    """The sequences of several tokens each; arguments as in `build_attention_metadata`."""
    return [
        PrefillRow(
            start=int(query_start_loc[row]),
            end=int(query_start_loc[row + 1]),
            seq_len=int(seq_lens[row]),
            block_table=torch.from_numpy(block_tables[row, : -(-int(seq_lens[row]) // block_size)]).to(device),
            prompt_len=int(prompt_lens[row]),
        )
        for row in np.flatnonzero(np.diff(query_start_loc) > 1)
    ]


def _similar_lengths(rows: np.ndarray, seq_lens: np.ndarray, block_size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Split rows into groups padded to one number of blocks, at most twice what their shortest row needs."""
    num_blocks = -(-seq_lens[rows] // block_size)
    order = np.argsort(num_blocks, kind="stable")
    rows, num_blocks = rows[order], num_blocks[order]
    start = 0
    while start < len(rows):
        longest = 2 * int(num_blocks[start])
        end = int(np.searchsorted(num_blocks, longest, side="right"))
        end = min(end, start + max(1, _MAX_GROUP_SLOTS // (longest * block_size)))
        yield rows[start:end], int(num_blocks[end - 1])
        start = end
