"""The weights of a loaded model, overwritten in place: what is tied stays tied, and the module stays the same.

Owner: the busy-loop thread. Knows no versions, and no pause.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine_core.model_executor.executor import ExecutorFailedError, WeightTensor
from engine_core.model_executor.loader import LoadedModel, load_again
from engine_core.model_executor.startup_error import StartupError


class ModelWeights:
    """Parameters by name. A weight that several modules share is one parameter with one name."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        # From the start: a weight that was discarded has lost its own.
        self.shapes = _shapes(loaded.module)

    def load(self, directory: Path) -> int:
        """As `Executor.load_weights`: the old ones are there until the new ones are whole."""
        # Beside the old ones on the host, where there is more room.
        are_discarded = _shapes(self._loaded.module) != self.shapes
        module = load_again(self._loaded, directory, self._loaded.device if are_discarded else torch.device("cpu"))
        self._require_same(module)
        try:
            return self._take_over(module)
        except Exception as error:
            raise ExecutorFailedError(f"the weights could not all be replaced: {error}") from error

    def discard(self) -> int:
        """Let go of the memory; returns the bytes. Buffers stay: they come from the config."""
        freed_bytes = 0
        for parameter in self._loaded.module.parameters():
            freed_bytes += parameter.nbytes
            # The parameter itself stays, and with it what is tied to it.
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        return freed_bytes

    @torch.no_grad()
    def update(self, tensors: list[WeightTensor]) -> None:
        """Overwrite some; each keeps its own type."""
        parameters = dict(self._loaded.module.named_parameters())
        for tensor in tensors:
            values = torch.frombuffer(tensor.data, dtype=getattr(torch, tensor.dtype))
            parameters[tensor.name].data.copy_(values.view(tensor.shape))

    def _require_same(self, other: torch.nn.Module) -> None:
        shapes = _shapes(other)
        for name in sorted(self.shapes.keys() | shapes.keys()):
            if self.shapes.get(name) != shapes.get(name):
                found, own = _describe(shapes.get(name)), _describe(self.shapes.get(name))
                raise StartupError(f"{name} is {found}, and {own} in the running model")

    @torch.no_grad()
    def _take_over(self, other: torch.nn.Module) -> int:
        """All values of a model with the same weights, which is empty afterwards."""
        sources = dict(other.named_parameters())
        num_bytes = 0
        for name, parameter in self._loaded.module.named_parameters():
            source = sources[name]
            if parameter.shape == source.shape:
                parameter.data.copy_(source.data)
            else:
                # A copy: on a CPU the source is a mapping of its file.
                parameter.data = source.data.clone()
            # At once, or both models would be in memory until the other is collected.
            source.data = torch.empty(0, dtype=source.dtype, device=source.device)
            num_bytes += parameter.nbytes
        return num_bytes


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _describe(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"
