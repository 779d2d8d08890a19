"""Utility operations that change the weights: one frozen pair of call and result for each, as in `operations`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReloadWeights:
    """Load all weights from disk. Empty = from the directory of the model."""

    path: str = ""


@dataclass(frozen=True, slots=True)
class ReloadWeightsResult:
    """They are in force."""

    version: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StartWeightUpdate:
    """Accept tensors, which are in force from the finish on, under this version."""

    version: str


@dataclass(frozen=True, slots=True)
class StartWeightUpdateResult:
    """What the calls that belong to this update must carry; equal on all engines."""

    update_id: str


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A part of one tensor: row-major, little-endian bytes from `offset` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Stage tensors by value, or all those of a checkpoint."""

    update_id: str
    pieces: tuple[TensorPiece, ...] = ()
    path: str = ""


@dataclass(frozen=True, slots=True)
class UpdateWeightsResult:
    """Whole tensors that are staged by now."""

    num_tensors: int


@dataclass(frozen=True, slots=True)
class FinishWeightUpdate:
    """Put what is staged in force, or drop it."""

    update_id: str
    discard: bool = False


@dataclass(frozen=True, slots=True)
class FinishWeightUpdateResult:
    """The version in force."""

    version: str


@dataclass(frozen=True, slots=True)
class GetWeightVersion:
    """Ask for the version."""


@dataclass(frozen=True, slots=True)
class GetWeightVersionResult:
    """The version in force."""

    version: str
