"""Profiles of the step loop: one at a time, into a directory of the operator's choice. Owner: the busy-loop thread."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from engine_core.model_executor.executor import Executor
from engine_core.operations import StartProfileResult, StopProfileResult
from stepwire.errors import InvalidRequestError, StepwireError

logger = logging.getLogger(__name__)

# A plain name: it must not lead out of the directory.
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ProfileControl:
    """Starts, counts steps, stops."""

    def __init__(self, executor: Executor, directory: Path | None) -> None:
        self._executor = executor
        self._directory = directory
        self._is_running = False
        self._prefix = ""
        # The step behind which it stops by itself; None = it is stopped.
        self._last_step: int | None = None

    def start(self, num_steps: int, prefix: str, step: int) -> StartProfileResult:
        """From behind `step` on; `num_steps` 0 = until it is stopped."""
        if self._directory is None:
            raise StepwireError("profiles are off: the engine has no --profile-dir", reason="PROFILING_OFF")
        if self._is_running:
            raise StepwireError("a profile is running already", reason="PROFILE_RUNNING")
        if prefix and not _PREFIX.fullmatch(prefix):
            raise InvalidRequestError("prefix: at most 64 letters, digits, dots, dashes and underscores are allowed")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._executor.start_profile()
        self._is_running, self._prefix = True, prefix
        self._last_step = step + num_steps if num_steps else None
        return StartProfileResult(str(self._directory))

    def stop(self) -> StopProfileResult:
        if self._directory is None or not self._is_running:
            raise StepwireError("no profile is running", reason="PROFILE_NOT_RUNNING")
        # Also when writing fails the recording is over.
        self._is_running = False
        files = self._executor.stop_profile(self._directory, self._prefix)
        logger.info("profile written: %s", ", ".join(files))
        return StopProfileResult(files)

    def on_step(self, step: int) -> None:
        """The steps up to this one are complete: the profile may have seen enough."""
        if not self._is_running or self._last_step is None or step < self._last_step:
            return
        try:
            self.stop()
        except Exception:
            # Nobody waits for an answer, and a full disk is no reason to die.
            logger.exception("the profile could not be written")
