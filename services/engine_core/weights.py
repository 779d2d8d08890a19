"""Weights that change while the engine lives: reloads, staged updates, and their version. Owner: the busy-loop thread.

They change only while a pause holds, and never half: what fails before the change leaves the old ones in force, what
fails within it ends the engine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from engine_core.core import EngineCore
from engine_core.model_executor.checkpoint import CheckpointError, checkpoint_files, content_version, read_headers
from engine_core.model_executor.executor import ExecutorFailedError
from engine_core.model_executor.startup_error import StartupError
from engine_core.pause import PauseControl
from engine_core.staged_weights import StagedWeights, require_trusted
from engine_core.weight_operations import (
    FinishWeightUpdate,
    FinishWeightUpdateResult,
    GetWeightVersionResult,
    ReloadWeightsResult,
    StartWeightUpdateResult,
    UpdateWeights,
    UpdateWeightsResult,
)
from stepwire.errors import InvalidRequestError, StepwireError

logger = logging.getLogger(__name__)

# It travels in Ready, in statistics and in answers.
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,63}")

T = TypeVar("T")


class WeightControl:
    """One update at a time. `on_change` is called when a version has come into force."""

    def __init__(self, core: EngineCore, pause: PauseControl, on_change: Callable[[], None]) -> None:
        self._core = core
        self._pause = pause
        self._on_change = on_change
        # Where a sleep that drops the weights finds them again.
        self._directory = core.config.served_model.directory
        self._staged: StagedWeights | None = None

    @property
    def version(self) -> GetWeightVersionResult:
        return GetWeightVersionResult(self._core.config.served_model.weight_version)

    def reload(self, path: str) -> ReloadWeightsResult:
        """All weights from disk, under a version that names their content."""
        self.require_changeable()
        self._require_paused()
        self.require_no_update()
        directory = self._trusted(path) if path else self._core.config.served_model.directory
        num_bytes = self._load(directory)
        self._directory = directory
        return ReloadWeightsResult(self.version.version, num_bytes)

    def start_update(self, version: str) -> StartWeightUpdateResult:
        """The id is the version, so that one call can go on to several engines."""
        self.require_changeable()
        self._require_paused()
        self.require_no_update()
        if not _VERSION.fullmatch(version):
            raise InvalidRequestError.of_field("version", "1 to 64 letters, digits and ._:+- are needed")
        if version == self.version.version:
            raise InvalidRequestError.of_field("version", f"{version} is that of the weights in force")
        self._staged = StagedWeights(version, self._core.executor.weight_shapes())
        return StartWeightUpdateResult(version)

    def update(self, call: UpdateWeights) -> UpdateWeightsResult:
        """Stage tensors; the weights stay as they are."""
        staged = self._open(call.update_id)
        if call.path and call.pieces:
            raise InvalidRequestError.of_field("path", "tensors come by value or from a path, not both")
        if call.path:
            directory = self._trusted(call.path)
            _read(directory, lambda: staged.add_checkpoint(read_headers(checkpoint_files(directory))))
        else:
            staged.add_pieces(call.pieces)
        return UpdateWeightsResult(staged.num_tensors)

    def finish_update(self, call: FinishWeightUpdate) -> FinishWeightUpdateResult:
        staged = self._open(call.update_id)
        # The pause still holds: nothing resumes while an update is open.
        if not call.discard:
            tensors = staged.take()
            try:
                self._core.executor.update_weights(tensors)
            except Exception as error:
                # Everything that could be checked was: some of the weights may be new and some old.
                raise ExecutorFailedError(f"the weight update {staged.version} failed half way: {error}") from error
            self._in_force(staged.version)
        self._staged = None
        return FinishWeightUpdateResult(self.version.version)

    def discard(self) -> int:
        """Drop the weights without keeping them anywhere; returns the bytes."""
        return self._core.executor.discard_weights()

    def restore_discarded(self) -> None:
        """Load them again from where the last whole ones came. Raises, and then they are still away."""
        self._load(self._directory)

    def require_changeable(self) -> None:
        """For everything that changes or drops the weights, before anything is done for it."""
        if not self._core.executor.can_change_weights:
            text = "an engine of several workers can not change its weights: start it anew with the others"
            raise StepwireError(text, reason="UNSUPPORTED_FEATURE")

    def require_no_update(self) -> None:
        """For what must not happen between the start and the finish of an update."""
        if self._staged is not None:
            text = f"the weight update {self._staged.version} is open: finish or discard it first"
            raise StepwireError(text, reason="WEIGHT_UPDATE_OPEN")

    def end(self) -> None:
        """The engine shuts down: nobody will finish."""
        self._staged = None

    def _load(self, directory: Path) -> int:
        version = _read(directory, lambda: content_version(directory))
        num_bytes = _read(directory, lambda: self._core.executor.load_weights(directory))
        self._in_force(version)
        return num_bytes

    def _in_force(self, version: str) -> None:
        core = self._core
        # What is cached, and what frozen requests have computed, belongs to the old weights.
        core.reset_prefix_cache(reset_running_requests=True)
        core.config = replace(core.config, served_model=replace(core.config.served_model, weight_version=version))
        logger.info("weights of version %s are in force", version)
        self._on_change()

    def _open(self, update_id: str) -> StagedWeights:
        if self._staged is None or self._staged.version != update_id:
            text = f"no weight update with the id {update_id[:64]!r} is open"
            raise StepwireError(text, reason="WEIGHT_UPDATE_UNKNOWN")
        return self._staged

    def _require_paused(self) -> None:
        if not self._pause.is_complete:
            raise StepwireError("weights change only while the engine is paused", reason="ENGINE_NOT_PAUSED")

    def _trusted(self, path: str) -> Path:
        """The directory of a call, when it and the files that its index names may be read."""
        directory, trusted = Path(path).expanduser(), self._core.config.trusted_dirs
        require_trusted(directory, trusted)
        for file in _read(directory, lambda: checkpoint_files(directory)):
            require_trusted(file, trusted)
        return directory


def _read(directory: Path, reading: Callable[[], T]) -> T:
    """A checkpoint that can not be used is no fault of the engine."""
    try:
        return reading()
    except (CheckpointError, StartupError) as error:
        text = f"the weights in {directory} can not be used: {error}"
        raise StepwireError(text, reason="WEIGHTS_UNUSABLE") from error
