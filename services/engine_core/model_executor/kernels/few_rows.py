"""Products of a few rows with a weight that oneDNN has packed, in C++: they read it faster than oneDNN does.

The kernel reads oneDNN's own memory, so that nothing is held twice. How the weight lies there is found out for each
shape, and taken for granted nowhere. Owner: the thread that runs the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from engine_core.model_executor.kernels.cpu_build import INSTRUCTION_SETS

# Columns side by side, by the number of vectors that oneDNN's own kernels work on.
_PANEL_WIDTHS = (64, 48, 32, 16)


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """A packed weight [columns, depth] as it lies in memory. Good for as long as the packed one is."""

    panels: torch.Tensor
    bias: torch.Tensor | None
    columns: int
    depth: int
    # Of a weight of int8: the scale of each column, float32, and the sum of its numbers, int32 and padded.
    scales: torch.Tensor | None = None
    sums: torch.Tensor | None = None


class FewRows:
    """For float32 and bfloat16, and one instruction set."""

    def __init__(self, operators: Any, instruction_set: str) -> None:
        self._set = INSTRUCTION_SETS.index(instruction_set)
        self._operators = operators
        self._multiply = operators.multiply_packed.default

    def read(self, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> PanelWeight | None:
        """How `packed` lies in memory; None where that is not known here, or oneDNN is as fast."""
        if self.max_rows(weight.dtype) == 0:
            return None
        panels = panels_of(packed, weight.shape, weight.dtype)
        return None if panels is None else PanelWeight(panels, bias, columns=len(weight), depth=weight.shape[1])

    def product(self, weight: PanelWeight) -> Callable[[torch.Tensor], torch.Tensor]:
        """x [T, in] -> [T, out]"""
        multiply, instruction_set = self._multiply, self._set
        panels, bias, columns = weight.panels, weight.bias, weight.columns
        return lambda x: multiply(x, panels, bias, columns, instruction_set)

    def max_rows(self, dtype: torch.dtype) -> int:
        """With more of them oneDNN may be faster."""
        return int(self._operators.packed_rows(dtype == torch.bfloat16, self._set))


def panels_of(packed: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    """The memory of `packed`, as [panels, in / n, columns of a panel, n] with n numbers of a column side by side."""
    width = _panel_width(shape, dtype, torch.get_num_threads())
    if width is None:
        return None
    memory, numbers = _memory(packed, dtype), 4 // dtype.itemsize
    return memory.view(-(-shape[0] // width), -1, width, numbers)


@lru_cache
def _panel_width(shape: torch.Size, dtype: torch.dtype, _num_threads: int) -> int | None:
    """Columns of the panels in which oneDNN lays out such a weight; None if it does otherwise."""
    # Exact in every type, and so many that no other order of them is the same.
    sample = torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(sample, None)
    memory = _memory(packed, dtype)
    for width in _PANEL_WIDTHS:
        panels = in_panels(sample, width, len(memory) // (-(-len(sample) // width) * width))
        if panels is not None and torch.equal(memory, panels.flatten()):
            return width
    return None


def in_panels(weight: torch.Tensor, width: int, padded_depth: int) -> torch.Tensor | None:
    """A weight laid out in panels; None if it has no place in them."""
    numbers, (columns, depth) = 4 // weight.dtype.itemsize, weight.shape
    if padded_depth < depth or padded_depth % numbers:
        return None
    num_panels = -(-columns // width)
    padded = weight.new_zeros(num_panels * width, padded_depth)
    padded[:columns, :depth] = weight
    return padded.view(num_panels, width, -1, numbers).transpose(1, 2).contiguous()


def _memory(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Good for as long as `packed` is."""
    address, num_bytes = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=dtype)
