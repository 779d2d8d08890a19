"""Small arrays of the host on the model's device, as the sampler needs them.

Owner: the thread that runs the model. On a CPU nothing is copied: the tensor shares the array's memory.
"""

from __future__ import annotations

import numpy as np
import torch


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The copy does not wait for the forward pass that is queued before it."""
    return torch.from_numpy(array).to(device, non_blocking=True)
