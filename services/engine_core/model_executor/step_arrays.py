"""The arrays of a step, computed by array operations into buffers that stay.

Owner: the busy-loop thread. Knows rows and positions, and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from engine_core.model_executor.block_table import BlockTable
from engine_core.model_executor.row_table import RowTable
from engine_core.model_executor.staging_buffer import StagingBuffer


class StepArrays:
    """Buffers of one worker. Every array is valid until the next step asks for the same one."""

    def __init__(self, num_seqs: int, num_groups: int) -> None:
        def buffer(dtype: DTypeLike, size: int = num_seqs) -> StagingBuffer:
            return StagingBuffer(dtype, size)

        self._query_start_loc = buffer(np.int32, num_seqs + 1)
        self._seq_lens, self._prompt_lens = buffer(np.int32), buffer(np.int32)
        self._positions, self._input_ids, self._logits_indices = (buffer(np.int64) for _ in range(3))
        self._slots = [buffer(np.int64) for _ in range(num_groups)]
        # Of each token in a batch with longer queries.
        self._places, self._token_rows = (StagingBuffer(np.int64, num_seqs) for _ in range(2))
        # 0, 1, 2, ...: of one token a sequence, nearly everything is this.
        self._count = np.arange(num_seqs + 1)

    def of_decodes(self, rows: np.ndarray, computed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One token for each row: the rows of the tokens, query_start_loc and positions."""
        query_start_loc = self._query_start_loc.take(len(rows) + 1)
        query_start_loc[:] = self._counting(len(rows) + 1)
        positions = self._positions.take(len(rows))
        positions[:] = computed
        return rows, query_start_loc, positions

    def of_queries(
        self, rows: np.ndarray, computed: np.ndarray, query_lens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same for any number of tokens > 0 of each row."""
        query_start_loc = self._query_start_loc.take(len(rows) + 1)
        query_start_loc[0] = 0
        np.cumsum(query_lens, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        # The place of each token's row: one more where a row begins.
        places = self._places.take(num_tokens)
        places[:] = 0
        places[query_start_loc[1:-1]] = 1
        np.cumsum(places, out=places)
        token_rows = np.take(rows, places, out=self._token_rows.take(num_tokens), mode="clip")
        first_positions = computed - query_start_loc[:-1]
        positions = np.take(first_positions, places, out=self._positions.take(num_tokens), mode="clip")
        positions += self._counting(num_tokens)
        return token_rows, query_start_loc, positions

    def seq_lens(self, computed: np.ndarray, query_start_loc: np.ndarray) -> np.ndarray:
        seq_lens = self._seq_lens.take(len(computed))
        np.subtract(query_start_loc[1:], query_start_loc[:-1], out=seq_lens)
        np.add(seq_lens, computed, out=seq_lens, casting="same_kind")
        return seq_lens

    def prompt_lens(self, num_prompt: np.ndarray) -> np.ndarray:
        prompt_lens = self._prompt_lens.take(len(num_prompt))
        prompt_lens[:] = num_prompt
        return prompt_lens

    def input_ids(self, tokens: RowTable, token_rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        input_ids = self._input_ids.take(len(positions))
        return np.take(tokens.values.ravel(), tokens.places(token_rows, positions), out=input_ids, mode="clip")

    def slot_mappings(
        self, tables: Sequence[BlockTable], token_rows: np.ndarray, positions: np.ndarray, block_size: int
    ) -> tuple[np.ndarray, ...]:
        slots = tuple(buffer.take(len(positions)) for buffer in self._slots)
        for table, out in zip(tables, slots, strict=True):
            table.slots(token_rows, positions, block_size, out)
        return slots

    def places_of(self, is_wanted: np.ndarray) -> np.ndarray:
        """Where it is true. Stays as it is behind the step."""
        return self._counting(len(is_wanted)) if is_wanted.all() else np.flatnonzero(is_wanted)

    def last_tokens(self, query_start_loc: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        indices = self._logits_indices.take(len(sampled))
        if len(sampled) == len(query_start_loc) - 1:
            np.subtract(query_start_loc[1:], 1, out=indices)
        else:
            np.subtract(query_start_loc[1:][sampled], 1, out=indices)
        return indices

    def _counting(self, num: int) -> np.ndarray:
        if num > len(self._count):
            self._count = np.arange(max(num, 2 * len(self._count)))
        return self._count[:num]
