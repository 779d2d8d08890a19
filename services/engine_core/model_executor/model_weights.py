"""The weights of a loaded model, overwritten in place: what is tied stays tied, and the module stays the same.

Owner: the busy-loop thread. Knows no versions, and no pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from engine_core.model_executor.executor import ExecutorFailedError, WeightTensor
from engine_core.model_executor.loader import LoadedModel, load_again
from engine_core.model_executor.startup_error import StartupError


class Packing(Protocol):
    """Holds the weights in a form of its own, made from the module, which is empty meanwhile."""

    def pack(self) -> None:
        """Take them from the module."""

    def unpack(self) -> None:
        """Give them back."""

    def drop(self) -> None:
        """Let go of them."""


class ModelWeights:
    """Parameters and saved buffers, by their names in the module. What several modules share has one name.

    Not always a checkpoint's names: transformers renames and fuses while it loads, as with the experts of a MoE model.
    """

    def __init__(self, loaded: LoadedModel, packing: Packing | None = None) -> None:
        """packing: who holds the weights in another form while the model runs."""
        self._loaded = loaded
        self._packing = packing
        self.are_discarded = False
        # From the start: a weight that was discarded has lost its own.
        self.shapes = _shapes(loaded.module)

    def load(self, directory: Path) -> int:
        """As `Executor.load_weights`: the old ones are there until the new ones are whole."""
        # Beside the old ones on the host, where there is more room.
        device = self._loaded.device if self.are_discarded else torch.device("cpu")
        module = load_again(self._loaded, directory, device)
        self._require_same(module)
        try:
            with self._in_module():
                num_bytes = self._take_over(module)
            self.are_discarded = False
            return num_bytes
        except Exception as error:
            raise ExecutorFailedError(f"the weights could not all be replaced: {error}") from error

    def discard(self) -> int:
        """Let go of the memory; returns the bytes. Buffers stay: they are small."""
        if self.are_discarded:
            return 0
        self.are_discarded = True
        if self._packing is not None:
            self._packing.drop()
        for parameter in self._loaded.module.parameters():
            # The parameter itself stays, and with it what is tied to it.
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        return self._loaded.weight_bytes

    @torch.no_grad()
    def update(self, tensors: list[WeightTensor]) -> None:
        """Overwrite some; each keeps its own type."""
        with self._in_module():
            weights = _weights(self._loaded.module)
            for tensor in tensors:
                # torch makes no tensor of an empty buffer, and there is nothing to overwrite.
                if tensor.data:
                    values = torch.frombuffer(tensor.data, dtype=getattr(torch, tensor.dtype))
                    weights[tensor.name].data.copy_(values.view(tensor.shape))

    @contextmanager
    def _in_module(self) -> Iterator[None]:
        """The weights are in the module while they change, unless they are discarded."""
        if self._packing is not None and not self.are_discarded:
            self._packing.unpack()
        yield
        if self._packing is not None:
            self._packing.pack()

    def _require_same(self, other: torch.nn.Module) -> None:
        shapes = _shapes(other)
        for name in sorted(self.shapes.keys() | shapes.keys()):
            if self.shapes.get(name) != shapes.get(name):
                found, own = _describe(shapes.get(name)), _describe(self.shapes.get(name))
                raise StartupError(f"{name} is {found}, and {own} in the running model")

    @torch.no_grad()
    def _take_over(self, other: torch.nn.Module) -> int:
        """All values of a model with the same weights, which is empty afterwards."""
        sources = _weights(other)
        num_bytes = 0
        for name, weight in _weights(self._loaded.module).items():
            source = sources[name]
            if weight.shape == source.shape:
                weight.data.copy_(source.data)
            else:
                # A copy: on a CPU the source is a mapping of its file.
                weight.data = source.data.clone()
            # At once, or both models would be in memory until the other is collected.
            source.data = torch.empty(0, dtype=source.dtype, device=source.device)
            num_bytes += weight.nbytes
        return num_bytes


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in _weights(module).items()}


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds. Other buffers come from the config."""
    saved = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {**dict(module.named_parameters()), **buffers}


def _describe(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"
