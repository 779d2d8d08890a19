"""Arrays of the host on the model's device, without waiting for what the device is doing.

Owner: the busy-loop thread. Where the device is the CPU nothing is copied: the tensor shares the array's memory.
"""

from __future__ import annotations

import numpy as np
import torch


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array in pinned memory must stay as it is until an `UploadFence` set behind this call is passed."""
    # A blocking copy would wait for the forward pass that is queued before it.
    return torch.from_numpy(array).to(device, non_blocking=True)


class UploadFence:
    """When the device has read what was handed to `on_device`, so that the arrays may be overwritten."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own

    def set(self) -> None:
        """Behind everything that was handed over so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Returns at once if it was never set. Steps that sample have waited longer already."""
        if self._event is not None:
            self._event.synchronize()
