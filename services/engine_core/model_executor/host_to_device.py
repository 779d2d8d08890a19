"""Small arrays of the host on the model's device, without waiting for what the device is doing.

Owner: the busy-loop thread. Where the device is the CPU nothing is copied: the tensor shares the array's memory.
"""

from __future__ import annotations

import numpy as np
import torch


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array may be overwritten once the device has copied it: behind the next wait for results."""
    # A blocking copy would wait for the forward pass that is queued before it.
    return torch.from_numpy(array).to(device, non_blocking=True)
