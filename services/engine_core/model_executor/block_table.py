"""The block tables of one group of layers: a row for each request, and the rows of the running batch side by side.

Owner: the busy-loop thread. The rows of the batch are gathered when others run or when the longest of them grows; else
a new block is written to both places, so that a step pays for new blocks alone.
"""

from __future__ import annotations

import numpy as np

from engine_core.model_executor.row_table import RowTable
from engine_core.model_executor.staging_buffer import StagingBuffer


class BlockTable:
    """Entries past a request's last block are 0, the null block: they are read, and masked."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._table = RowTable(num_rows, num_columns, np.int32)
        self._buffer = StagingBuffer(np.int32, num_rows * num_columns)
        self._of_batch = self._buffer.take(0).reshape(0, 0)

    def ensure_rows(self, num_rows: int) -> None:
        self._table.ensure(num_rows, 0)

    def write(self, row: int, start: int, block_ids: list[int], place: int) -> None:
        """Blocks of a request from its `start`-th on; `place` is that of its row in the batch, negative = not in it."""
        end = start + len(block_ids)
        self._table.ensure(0, end)
        self._table.values[row, start:end] = block_ids
        if place >= 0 and end <= self._of_batch.shape[1]:
            self._of_batch[place, start:end] = block_ids

    def clear(self, row: int, num_blocks: int) -> None:
        """The batch has to be gathered before it is used again."""
        self._table.values[row, :num_blocks] = 0

    def gather(self, rows: np.ndarray, num_columns: int) -> None:
        """Put the rows of the batch side by side."""
        shape = (len(rows), num_columns)
        self._of_batch = self._buffer.take(shape[0] * shape[1]).reshape(shape)
        self._of_batch[:] = self._table.values[rows, :num_columns]

    @property
    def of_batch(self) -> np.ndarray:
        """int32 [B, N], as gathered last and kept up to date since then."""
        return self._of_batch

    def slots(self, rows: np.ndarray, positions: np.ndarray, block_size: int, out: np.ndarray) -> None:
        """Where the KV of each token goes, block * block_size + offset; rows [T], positions [T] -> out int64 [T]."""
        columns = positions // block_size
        blocks = self._table.values.ravel()[self._table.places(rows, columns)]
        np.multiply(blocks, block_size, out=out, dtype=np.int64)
        out += positions
        out -= columns * block_size
