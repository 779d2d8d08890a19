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
        # Steps until it stops by itself; None = until it is stopped.
        self._num_steps_left: int | None = None

    def start(self, num_steps: int, prefix: str) -> StartProfileResult:
        if self._directory is None:
            raise StepwireError("profiles are off: the engine has no --profile-dir", reason="PROFILING_OFF")
        if self._is_running:
            raise StepwireError("a profile is running already", reason="PROFILE_RUNNING")
        if prefix and not _PREFIX.fullmatch(prefix):
            raise InvalidRequestError("prefix: at most 64 letters, digits, dots, dashes and underscores are allowed")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._executor.start_profile()
        self._is_running, self._prefix, self._num_steps_left = True, prefix, num_steps or None
        return StartProfileResult(str(self._directory))

    def stop(self) -> StopProfileResult:
        if self._directory is None or not self._is_running:
            raise StepwireError("no profile is running", reason="PROFILE_NOT_RUNNING")
        # Also when writing fails the recording is over.
        self._is_running = False
        files = self._executor.stop_profile(self._directory, self._prefix)
        logger.info("profile written: %s", ", ".join(files))
        return StopProfileResult(files)

    def on_step(self) -> None:
        """A step is complete: the profile may have seen enough."""
        if not self._is_running or self._num_steps_left is None:
            return
        self._num_steps_left -= 1
        if self._num_steps_left == 0:
            try:
                self.stop()
            except Exception:
                # Nobody waits for an answer, and a full disk is no reason to die.
                logger.exception("the profile could not be written")
