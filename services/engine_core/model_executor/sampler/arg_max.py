"""The likeliest token of each row, straight from the logits: no conversion, no copy.

Owner: the busy-loop thread. On a CPU torch's arg-max visits one value at a time, 0.1 to 0.25 ms for 49 152 tokens;
NumPy's is vectorised and takes some µs, and a half-precision number can be compared by its bits.
"""

from __future__ import annotations

import numpy as np
import torch

# All bits but the sign.
_MAGNITUDE = np.int16(0x7FFF)


def arg_max(logits: torch.Tensor) -> torch.Tensor:
    """logits [B, V] of any float type -> token ids int64 [B] on the same device; of equal maxima the lowest id."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        return torch.from_numpy(_arg_max_of_halves(logits.view(torch.int16).numpy()))
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _arg_max_of_halves(bits: np.ndarray) -> np.ndarray:
    """bits int16 [B, V] of floats. Numbers with a sign are below all others as integers, but in reverse order."""
    token_ids: np.ndarray = bits.argmax(axis=-1)
    best = np.take_along_axis(bits, token_ids[:, None], axis=-1)[:, 0]
    if best.min(initial=1) <= 0:
        is_negative, is_zero = best < 0, best == 0
        token_ids[is_negative] = bits[is_negative].argmin(axis=-1)
        # -0 equals 0, and is below it as an integer.
        token_ids[is_zero] = (bits[is_zero] & _MAGNITUDE == 0).argmax(axis=-1)
    return token_ids
