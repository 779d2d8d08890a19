"""Memory that the arrays of a step are written into, step after step, so that a step allocates nothing.

Owner: the thread that runs the model. Growth doubles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike


class StagingBuffer:
    """An array that is lent out in part."""

    def __init__(self, dtype: DTypeLike, num_values: int) -> None:
        self._values = np.zeros(num_values, dtype=dtype)

    def take(self, num_values: int) -> np.ndarray:
        """The first values as a view; what a former view of the same buffer shows may change with it."""
        if num_values > len(self._values):
            self._values = np.zeros(max(num_values, 2 * len(self._values)), dtype=self._values.dtype)
        return self._values[:num_values]
