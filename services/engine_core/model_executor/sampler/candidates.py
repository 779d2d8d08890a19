"""The few hundred likeliest tokens of each row, in id order: what truncation nearly always leaves is among them.

Owner: the busy-loop thread. Nothing is sorted but the candidates; the vocabulary is only compared with a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# At least so many of each row.
NUM_CANDIDATES = 512
# On a CPU: each group's maximum is a value of the row, so the row has 512 values above the 512th of the maxima.
_GROUP = 32
_FORBIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class Candidates:
    """C tokens of each of R rows, at least as likely as all others of their row."""

    # float64 [R, C], -inf where a row has fewer.
    logits: torch.Tensor
    # int64 [R, C], ascending.
    token_ids: torch.Tensor
    # No other token of the row has a larger logit; -inf: no other token is possible. float64 [R].
    bounds: torch.Tensor


def likeliest(logits: torch.Tensor) -> Candidates:
    """logits: float32 [R, V]. The whole vocabulary if it is that small."""
    num_rows, vocab_size = logits.shape
    if vocab_size <= NUM_CANDIDATES:
        token_ids = torch.arange(vocab_size, device=logits.device).expand(num_rows, -1)
        return Candidates(logits.double(), token_ids, logits.new_full((num_rows,), _FORBIDDEN).double())
    if logits.device.type == "cpu":
        return _above_bounds(logits.numpy(), _bounds(logits))
    token_ids = logits.topk(NUM_CANDIDATES, dim=-1, sorted=False).indices.sort(dim=-1).values
    values = logits.gather(1, token_ids).double()
    return Candidates(values, token_ids, values.amin(dim=-1))


def _above_bounds(logits: np.ndarray, bounds: np.ndarray) -> Candidates:
    """For a CPU: a comparison of all values costs a fifth of a top-k."""
    lowest = np.maximum(bounds, np.finfo(np.float32).min)
    found = [np.flatnonzero(row >= bound) for row, bound in zip(logits, lowest, strict=True)]
    # Of a row that rules forbid whole, or that is no numbers, nothing is found; it must cost nobody else the step.
    width = max(1, *map(len, found))
    token_ids = np.zeros((len(found), width), dtype=np.int64)
    values = np.full((len(found), width), _FORBIDDEN)
    for row, ids in enumerate(found):
        token_ids[row, : len(ids)] = ids
        values[row, : len(ids)] = logits[row, ids]
    return Candidates(*map(torch.from_numpy, (values, token_ids, bounds.astype(np.float64))))


def _bounds(logits: torch.Tensor) -> np.ndarray:
    """A bound for each row, float32 [R], that at least 512 of its values reach."""
    num_whole = logits.shape[-1] // _GROUP
    if num_whole < 2 * NUM_CANDIDATES:
        # The least of too few maxima would be a low bound.
        maxima = logits.numpy()
    else:
        maxima = logits[:, : num_whole * _GROUP].reshape(len(logits), -1, _GROUP).amax(dim=-1).numpy()
    place = maxima.shape[-1] - NUM_CANDIDATES
    bounds: np.ndarray = np.partition(maxima, place, axis=-1)[:, place]
    return bounds
