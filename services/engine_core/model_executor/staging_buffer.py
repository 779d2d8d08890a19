"""Memory that the arrays of a step are written into, step after step, so that a step allocates nothing.

Owner: the busy-loop thread. On a GPU the memory is pinned: copies to the device need not be waited for. Growth doubles.
"""

from __future__ import annotations

import numpy as np
import torch


class StagingBuffer:
    """A tensor on the host, used through NumPy."""

    def __init__(self, dtype: torch.dtype, num_values: int, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self._tensor = torch.zeros(num_values, dtype=dtype, pin_memory=is_pinned)
        self._values = self._tensor.numpy()

    def take(self, num_values: int) -> np.ndarray:
        """The first values as a view; what a former view of the same buffer shows may change with it."""
        if num_values > len(self._values):
            num_grown = max(num_values, 2 * len(self._values))
            self._tensor = torch.zeros(num_grown, dtype=self._tensor.dtype, pin_memory=self._is_pinned)
            self._values = self._tensor.numpy()
        return self._values[:num_values]
