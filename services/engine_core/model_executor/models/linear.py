"""One matrix product of the native decoder, made of one or several of the loaded module.

On a CPU with oneDNN the matrix is packed once into the layout its kernel reads, and the module's own copy is given up:
nothing is held twice, but for the matrix of a tied embedding, which is read by rows too. `unpack` gives weights back
when they themselves are wanted; those that were int8 come back rounded. Owner: the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_core.model_executor.kernels.few_rows import FewRows, PanelWeight
from engine_core.model_executor.kernels.int8_weights import Int8Products, Int8Weight, panel_weight, values_of
from stepwire.errors import InvariantViolation

# x [T, in], weight [out, in], bias -> [T, out]
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Does something with the product, in place: the sum over the workers that share a layer.
Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """How the products of a model are made, where there is a choice."""

    # Instead of the fastest product there is.
    multiply: Multiply | None = None
    # Faster than oneDNN for a few rows of a packed weight.
    few_rows: FewRows | None = None
    # Weights are made int8.
    int8: Int8Products | None = None


class FusedLinear:
    """[T, in] -> [T, out of all parts, side by side]. Lives as long as the weights stay what they are."""

    def __init__(
        self,
        parts: Sequence[torch.nn.Linear],
        *,
        is_shared: bool = False,
        reduce: Reduce | None = None,
        options: LinearOptions | None = None,
    ) -> None:
        """is_shared: somebody else reads the only part's weight, which stays where it is."""
        self._parts = parts
        self._is_shared = is_shared
        self._reduce = reduce
        self._options = options or LinearOptions()
        bias = _joined([part.bias.data for part in parts]) if parts[0].bias is not None else None
        # Opaque to everything but its kernel.
        self._packed: torch.Tensor | None = None
        # The memory as the kernels of our own read it, where there is one that does.
        self.panels: PanelWeight | None = None
        if self._options.int8 is not None:
            self._product = self._quantize(self._options.int8, bias)
            return
        weight = _joined([part.weight.data for part in parts])
        if self._options.multiply is None and can_pack(weight):
            self._product = self._pack(weight, bias)
        else:
            self._product = self._keep(weight, bias, self._options.multiply or functional.linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x)
        return product if self._reduce is None else self._reduce(product)

    @property
    def is_reduced(self) -> bool:
        return self._reduce is not None

    def unpack(self) -> None:
        """Give the weights back to the module. No product may be asked for afterwards."""
        packed, self._packed = self._packed, None
        panels, self.panels = self.panels, None
        # It holds the packed form, which goes before the next one is unpacked.
        self._product = _given_back
        if packed is not None and not self._is_shared:
            self._share_out(packed.to_dense())
        int8 = self._options.int8
        if int8 is not None and panels is not None and panels.scales is not None and not self._is_shared:
            self._give_back(int8, panels, panels.scales)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        packed = self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        few_rows = self._options.few_rows
        self.panels = few_rows.read(packed, weight, bias) if few_rows is not None else None
        self._empty_parts()
        multiply = torch.ops.mkldnn._linear_pointwise.default
        if few_rows is None or self.panels is None:
            return lambda x: multiply(x, packed, bias, "none", [], "")
        of_few, most = few_rows.product(self.panels), few_rows.max_rows(weight.dtype)
        return lambda x: of_few(x) if len(x) <= most else multiply(x, packed, bias, "none", [], "")

    def _quantize(self, int8: Int8Products, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        weights = [int8.weight_of(part) for part in self._parts]
        scales = _joined([weight.scales for weight in weights])
        self.panels = panel_weight(_joined([weight.values for weight in weights]), scales, bias)
        self._empty_parts()
        return int8.product(self.panels)

    def _give_back(self, int8: Int8Products, weight: PanelWeight, scales: torch.Tensor) -> None:
        sizes = [part.out_features for part in self._parts]
        values = values_of(weight.panels, weight.columns, weight.depth)
        for part, *of_part in zip(self._parts, torch.split(values, sizes), torch.split(scales, sizes), strict=True):
            int8.given_back[part] = Int8Weight(*of_part)
            part.weight.data = int8.given_back[part].dense(part.weight.dtype)

    def _empty_parts(self) -> None:
        if not self._is_shared:
            for part in self._parts:
                part.weight.data = part.weight.new_empty(0)

    def _keep(
        self, weight: torch.Tensor, bias: torch.Tensor | None, multiply: Multiply
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        self._share_out(weight)
        return lambda x: multiply(x, weight, bias)

    def _share_out(self, weight: torch.Tensor) -> None:
        """Each part's weight becomes a view of the joined one."""
        sizes = [part.out_features for part in self._parts]
        for part, rows in zip(self._parts, torch.split(weight, sizes), strict=True):
            part.weight.data = rows


def _given_back(_: torch.Tensor) -> torch.Tensor:
    raise InvariantViolation("a product whose weights were given back")


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs this weight."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
