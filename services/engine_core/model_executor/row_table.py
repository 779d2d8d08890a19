"""A two-dimensional array that grows: one row for each request, as wide as the longest of them needs.

Owner: the busy-loop thread. Growth doubles, so that its cost is spread thin; nothing ever shrinks.
"""

from __future__ import annotations

import numpy as np


class RowTable:
    """Integers in `values` [rows, columns]; cells never written are 0."""

    def __init__(self, num_rows: int, num_columns: int, dtype: type[np.signedinteger] = np.int64) -> None:
        self.values = np.zeros((num_rows, num_columns), dtype=dtype)

    def ensure(self, num_rows: int, num_columns: int) -> None:
        """Make room for that many rows and columns; what is there keeps its place."""
        rows, columns = self.values.shape
        if num_rows <= rows and num_columns <= columns:
            return
        grown = np.zeros((_at_least(rows, num_rows), _at_least(columns, num_columns)), dtype=self.values.dtype)
        grown[:rows, :columns] = self.values
        self.values = grown

    def places(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Of those cells in `values.ravel()`: one look-up with one index costs half of one with two."""
        places: np.ndarray = rows * self.values.shape[1] + columns
        return places


def _at_least(size: int, needed: int) -> int:
    return size if needed <= size else max(2 * size, needed)
