"""What attention must know about one step's flattened batch. Built once a step for each group of layers.

Owner: the thread that runs the model. Values only; never reads or writes the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from engine_core.model_executor.attention.torch_batches import DecodeGroup, PrefillRow, decode_groups, prefill_rows
from engine_core.model_executor.host_to_device import on_device


@dataclass(frozen=True)
class HostBatch:
    """The same batch as arrays on the host, from which the torch reference cuts its rows."""

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    prompt_lens: np.ndarray
    block_tables: np.ndarray


@dataclass(frozen=True)
class AttentionMetadata:
    """T tokens of B sequences: where each token's KV goes, and what each token sees.

    The last token of sequence b is its token number seq_lens[b] - 1, and its others in this batch come right before it.
    """

    # int64 [T]: slot of each token in the cache, block * block_size + offset.
    slot_mapping: torch.Tensor
    # int32 [B + 1]: the first of each sequence's tokens in the flattened batch.
    query_start_loc: torch.Tensor
    # int32 [B]: known tokens of each sequence, this step's included.
    seq_lens: torch.Tensor
    # int32 [B, N]: entries past a sequence's last block are 0, the null block.
    block_tables: torch.Tensor
    max_query_len: int
    max_seq_len: int
    block_size: int
    host: HostBatch
    # Which of the groups of layers it is of.
    group: int = 0

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        host = self.host
        return decode_groups(host.query_start_loc, host.seq_lens, host.block_tables, self.block_size, self._device)

    @cached_property
    def prefill_rows(self) -> list[PrefillRow]:
        host = self.host
        return prefill_rows(
            host.query_start_loc, host.seq_lens, host.prompt_lens, host.block_tables, self.block_size, self._device
        )

    @property
    def _device(self) -> torch.device:
        return self.slot_mapping.device


def build_attention_metadata(
    *,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    prompt_lens: np.ndarray,
    block_tables: np.ndarray,
    slot_mapping: np.ndarray,
    block_size: int,
    device: torch.device,
) -> AttentionMetadata:
    """query_start_loc [B + 1] = first token of each sequence in the flattened batch; seq_lens [B] = known tokens after
    this step; block_tables [B, N] padded with 0; slot_mapping [T]; prompt_lens [B].
    """

    def int32(array: np.ndarray) -> torch.Tensor:
        return on_device(np.ascontiguousarray(array, dtype=np.int32), device)

    return AttentionMetadata(
        slot_mapping=on_device(slot_mapping, device),
        query_start_loc=int32(query_start_loc),
        seq_lens=int32(seq_lens),
        block_tables=int32(block_tables),
        max_query_len=int(np.diff(query_start_loc).max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        block_size=block_size,
        host=HostBatch(query_start_loc, seq_lens, prompt_lens, block_tables),
    )
