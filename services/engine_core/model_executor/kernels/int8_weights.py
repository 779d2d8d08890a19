"""Weights as int8 with a scale for each column of the product, and products with them in C++.

Rows of x are quantized too when they come, to some 16 bits: with 8 they would lose more than the weights do. Owner: the
thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine_core.model_executor.kernels.cpu_build import INSTRUCTION_SETS
from engine_core.model_executor.kernels.few_rows import PanelWeight

# As in csrc/int8.h.
_PANEL_COLUMNS, _DEPTH_MULTIPLE, _DEPTH_NUMBERS = 32, 64, 4
_LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """scales[i] * values[i] is row i of a weight [out, in], nearly."""

    # int8 [out, in] and float32 [out].
    values: torch.Tensor
    scales: torch.Tensor

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values * self.scales[:, None]).to(dtype)


def quantized(weight: torch.Tensor) -> Int8Weight:
    """Symmetric; the largest number of a row becomes 127 or -127."""
    largest = weight.abs().amax(dim=1).float()
    # A row of zeros stays one.
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    return Int8Weight((weight / scales[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales)


class Int8Products:
    """Products with weights of int8, for x of float32 or bfloat16 and one instruction set."""

    def __init__(self, operators: Any, instruction_set: str) -> None:
        self._set = INSTRUCTION_SETS.index(instruction_set)
        self._multiply = operators.multiply_int8.default
        # What the weights are that were given back to their modules, by module: most are taken again unchanged.
        self.given_back: dict[torch.nn.Module, Int8Weight] = {}

    def weight_of(self, part: torch.nn.Linear) -> Int8Weight:
        """The int8 weight that was given back, if the module has it still; else its weight quantized anew."""
        before = self.given_back.pop(part, None)
        if before is not None and torch.equal(before.dense(part.weight.dtype), part.weight.data):
            return before
        return quantized(part.weight.data)

    def product(self, weight: PanelWeight) -> Callable[[torch.Tensor], torch.Tensor]:
        """x [T, in] -> [T, out]."""
        multiply, columns, instruction_set = self._multiply, weight.columns, self._set
        panels, scales, sums, bias = weight.panels, weight.scales, weight.sums, weight.bias
        return lambda x: multiply(x, panels, scales, sums, bias, columns, instruction_set)


def panel_weight(values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> PanelWeight:
    """int8 [out, in] and float32 [out] as the kernel reads them."""
    panels = int8_panels(values)
    sums = panels.sum(dim=(1, 3), dtype=torch.int32).flatten()
    return PanelWeight(panels, bias, columns=len(values), depth=values.shape[1], scales=scales, sums=sums)


def int8_panels(values: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [panels, in / 4, 32, 4] with zeros behind what there is, as the kernel reads it."""
    columns, depth = values.shape
    num_panels, padded_depth = -(-columns // _PANEL_COLUMNS), -(-depth // _DEPTH_MULTIPLE) * _DEPTH_MULTIPLE
    padded = values.new_zeros(num_panels * _PANEL_COLUMNS, padded_depth)
    padded[:columns, :depth] = values
    return padded.view(num_panels, _PANEL_COLUMNS, -1, _DEPTH_NUMBERS).transpose(1, 2).contiguous()


def values_of(panels: torch.Tensor, columns: int, depth: int) -> torch.Tensor:
    """The inverse."""
    return panels.transpose(1, 2).reshape(len(panels) * _PANEL_COLUMNS, -1)[:columns, :depth].contiguous()
