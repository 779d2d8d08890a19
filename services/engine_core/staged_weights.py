"""Tensors of a weight update that wait for its finish. Owner: the busy-loop thread. Knows of a model its shapes only.

Everything that can be wrong with a tensor is found here, before anything changes. Staged tensors lie in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine_core.model_executor.checkpoint import CheckpointTensor, read_tensor
from engine_core.model_executor.executor import WEIGHT_DTYPES, WeightTensor
from engine_core.model_executor.host_memory import available_bytes, format_gib
from engine_core.weight_operations import TensorPiece
from stepwire.errors import InvalidRequestError, StepwireError

_MAX_NAME_CHARS = 80


@dataclass(slots=True)
class _Buffer:
    tensor: WeightTensor
    num_received: int = 0

    @property
    def is_whole(self) -> bool:
        return self.num_received == len(self.tensor.data)


@dataclass(slots=True)
class StagedWeights:
    """One open update. `shapes` are those of the model's weights."""

    version: str
    shapes: dict[str, tuple[int, ...]]
    _buffers: dict[str, _Buffer] = field(default_factory=dict)

    @property
    def num_tensors(self) -> int:
        """Whole ones."""
        return sum(buffer.is_whole for buffer in self._buffers.values())

    def take(self) -> list[WeightTensor]:
        """What is to be put in force. Raises StepwireError while something is missing."""
        for name, buffer in self._buffers.items():
            if not buffer.is_whole:
                missing = len(buffer.tensor.data) - buffer.num_received
                raise _incomplete(f"{missing} bytes of {_quoted(name)} have not come")
        if not self._buffers:
            raise _incomplete("no tensor was handed over")
        return [buffer.tensor for buffer in self._buffers.values()]

    def add_pieces(self, pieces: Sequence[TensorPiece]) -> None:
        """Stage tensors by value, piece by piece. Raises InvalidRequestError that names field and limit."""
        for index, piece in enumerate(pieces):
            self._check(f"tensors[{index}].", piece.name, piece.dtype, piece.shape)
        for index, piece in enumerate(pieces):
            self._add(f"tensors[{index}].", piece)

    def add_checkpoint(self, tensors: dict[str, CheckpointTensor]) -> None:
        """Stage all tensors of a checkpoint; they are read now, and what happens to the files later has no effect."""
        for name, tensor in tensors.items():
            self._check(f"path: {tensor.file.name}: ", name, tensor.dtype, tensor.shape)
        _require_memory("path", sum(tensor.num_bytes for tensor in tensors.values()))
        read = {
            name: WeightTensor(name, tensor.dtype, tensor.shape, read_tensor(tensor))
            for name, tensor in tensors.items()
        }
        self._buffers.update({name: _Buffer(tensor, len(tensor.data)) for name, tensor in read.items()})

    def _check(self, where: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        expected = self.shapes.get(name)
        if expected is None:
            raise InvalidRequestError.of_field(
                f"{where}name",
                f"{_quoted(name)} is no weight of this model (names are those of the loaded module, which may "
                "have fused what a checkpoint holds apart, such as experts; tied weights go by the name of the first)",
            )
        if dtype not in WEIGHT_DTYPES:
            raise InvalidRequestError.of_field(f"{where}dtype", f"{_quoted(dtype)} is not {' or '.join(WEIGHT_DTYPES)}")
        if shape != expected:
            raise InvalidRequestError.of_field(
                f"{where}shape", f"{_quoted(name)} has {list(expected)}, not {list(shape[:8])}"
            )

    def _add(self, where: str, piece: TensorPiece) -> None:
        buffer = self._buffers.get(piece.name)
        if piece.offset == 0:
            buffer = self._begin(where, piece)
        elif buffer is None or piece.offset != buffer.num_received:
            received = buffer.num_received if buffer else 0
            raise InvalidRequestError.of_field(
                f"{where}offset", f"{piece.offset} is not where {_quoted(piece.name)} goes on, which is {received}"
            )
        elif piece.dtype != buffer.tensor.dtype:
            raise InvalidRequestError.of_field(f"{where}dtype", f"the first piece was {buffer.tensor.dtype}")
        end, size = piece.offset + len(piece.data), len(buffer.tensor.data)
        if end > size:
            raise InvalidRequestError.of_field(
                f"{where}data", f"ends at byte {end}, and {_quoted(piece.name)} has {size} in {piece.dtype}"
            )
        memoryview(buffer.tensor.data)[piece.offset : end] = piece.data
        buffer.num_received = end
        self._buffers[piece.name] = buffer

    def _begin(self, where: str, piece: TensorPiece) -> _Buffer:
        size = math.prod(piece.shape) * WEIGHT_DTYPES[piece.dtype]
        _require_memory(f"{where}shape", size)
        return _Buffer(WeightTensor(piece.name, piece.dtype, piece.shape, bytearray(size)))


def require_trusted(path: Path, trusted: Sequence[Path]) -> None:
    """Raise InvalidRequestError for a path outside of the directories that the operator trusts, links followed."""
    resolved = path.resolve()
    if not any(resolved.is_relative_to(directory.resolve()) for directory in trusted):
        raise InvalidRequestError.of_field("path", f"{path} does not lie below one of the engine's --trusted-dirs")


def _require_memory(where: str, num_bytes: int) -> None:
    free = available_bytes()
    if num_bytes > free:
        raise InvalidRequestError.of_field(
            where, f"needs {format_gib(num_bytes)} of host memory until the finish, and {format_gib(free)} are free"
        )


def _incomplete(what: str) -> StepwireError:
    return StepwireError(f"the weight update is not complete: {what}", reason="WEIGHT_UPDATE_INCOMPLETE")


def _quoted(text: str) -> str:
    return repr(text[:_MAX_NAME_CHARS])
