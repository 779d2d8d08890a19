"""One step's flattened batch as arrays: the hand-off from the worker's request record to the model.

Owner: the busy-loop thread. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine_core.scheduler.request import RequestKey


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's flattened batch: T tokens of B sequences, in the scheduler's order."""

    keys: list[RequestKey]
    # Row of each sequence in the worker's tables, [B].
    rows: np.ndarray
    # First token of each sequence in the flattened batch, [B + 1].
    query_start_loc: np.ndarray
    # Computed tokens of each sequence after this step, [B].
    seq_lens: np.ndarray
    # Prompt tokens of each sequence, [B].
    prompt_lens: np.ndarray
    # For each group of layers: [B, N], 0 past a sequence's last block.
    block_tables: tuple[np.ndarray, ...]
    # [T] each
    input_ids: np.ndarray
    positions: np.ndarray
    # For each group of layers: [T]
    slot_mappings: tuple[np.ndarray, ...]
    # Sequences whose known tokens are all computed by this step, as indices into B, [S].
    sampled: np.ndarray

    @property
    def logits_indices(self) -> np.ndarray:
        """The last token of each sampled sequence, as an index into T, [S]."""
        last_tokens = self.query_start_loc[1:] - 1
        return np.asarray(last_tokens[self.sampled])
