"""A torch profile of the step loop's thread and the device, written as a Chrome trace. Owner: the busy-loop thread."""

from __future__ import annotations

import uuid
from pathlib import Path

import torch

from stepwire.errors import InvariantViolation


class TorchProfiler:
    """One recording at a time."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._profile = profile

    def stop(self, directory: Path, prefix: str) -> str:
        """Write the recording to a new file; also when that fails, nothing is recorded any more."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise InvariantViolation("a profile was stopped that had not been started")
        profile.stop()
        # Engines may share the directory.
        path = directory / f"{prefix or 'trace'}-{uuid.uuid4().hex[:8]}.json.gz"
        profile.export_chrome_trace(str(path))
        return str(path)

    def discard(self) -> None:
        """Stop without a file."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
