"""One step's flattened batch as arrays: the hand-off from the worker's request record to the model.

Owner: the thread that runs the model. Views of buffers that the next step is written into, unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine_core.scheduler.request import RequestKey


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's flattened batch: T tokens of B sequences, in the scheduler's order."""

    # Stays as it is behind the step, as `rows` and `sampled` do.
    keys: list[RequestKey]
    # Row of each sequence in the worker's tables, int64 [B].
    rows: np.ndarray
    # First token of each sequence in the flattened batch, int32 [B + 1].
    query_start_loc: np.ndarray
    # Computed tokens of each sequence after this step, int32 [B].
    seq_lens: np.ndarray
    # Prompt tokens of each sequence, int32 [B].
    prompt_lens: np.ndarray
    # For each group of layers: int32 [B, N], 0 past a sequence's last block.
    block_tables: tuple[np.ndarray, ...]
    # int64 [T] each
    input_ids: np.ndarray
    positions: np.ndarray
    # For each group of layers: int64 [T]
    slot_mappings: tuple[np.ndarray, ...]
    # Sequences whose known tokens are all computed by this step, as indices into B, int64 [S].
    sampled: np.ndarray
    # The last token of each sampled sequence, as an index into T, int64 [S].
    logits_indices: np.ndarray

    @property
    def sampled_rows(self) -> np.ndarray:
        """Row of each sampled sequence, [S]."""
        # All of them, ascending.
        return self.rows if len(self.sampled) == len(self.rows) else self.rows[self.sampled]
