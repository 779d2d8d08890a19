"""Truncation of the distribution: min-p, top-k, top-p. Only rows that use one are touched.

Owner: the busy-loop thread. Changes the logits in place. Every rule ends in a threshold on the value, so tokens of
equal probability share their fate and no sort order leaks into the answer.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_core.model_executor.host_to_device import on_device

# Nearly always the nucleus is among these; the rest of the vocabulary is sorted only when it is not.
_FIRST_CANDIDATES = 1024


def apply_min_p(logits: torch.Tensor, min_p: np.ndarray) -> None:
    """Keep tokens at least min_p [B] times as likely as the most likely one; 0 = off. logits: [B, V], scaled."""
    rows = np.flatnonzero(min_p > 0)
    if rows.size:
        index, limits = on_device(rows, logits.device), on_device(np.log(min_p[rows]), logits.device)
        selected = logits[index]
        logits[index] = _drop_below(selected, selected.amax(dim=-1) + limits)


def apply_top_k(logits: torch.Tensor, top_k: np.ndarray) -> None:
    """Keep the top_k [B] largest; 0 = off. logits: [B, V]."""
    rows = np.flatnonzero((top_k > 0) & (top_k < logits.shape[-1]))
    if rows.size:
        index, ranks = on_device(rows, logits.device), on_device(top_k[rows] - 1, logits.device)
        selected = logits[index]
        largest = selected.topk(int(top_k[rows].max()), dim=-1).values
        logits[index] = _drop_below(selected, largest.gather(1, ranks[:, None])[:, 0])


def apply_top_p(logits: torch.Tensor, top_p: np.ndarray, outside: torch.Tensor | None = None) -> None:
    """Keep the smallest set of likeliest tokens whose probability reaches top_p [B]; 1 = off. logits: [B, V].

    outside [B]: weight of all tokens that are not among the logits, where that of the likeliest one is 1.
    """
    rows = np.flatnonzero(top_p < 1)
    if rows.size:
        index, masses = on_device(rows, logits.device), on_device(top_p[rows], logits.device)
        selected = logits[index]
        probabilities = selected.softmax(dim=-1)
        if outside is not None:
            # The likeliest has probability 1 / (sum of weights) among the logits alone.
            probabilities /= 1 + outside[index, None] * probabilities.amax(dim=-1, keepdim=True)
        thresholds = _nucleus_thresholds(probabilities, masses)
        logits[index] = selected.masked_fill(probabilities < thresholds[:, None], float("-inf"))


def _nucleus_thresholds(probabilities: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """The least probability inside each row's nucleus, [B]."""
    width = min(_FIRST_CANDIDATES, probabilities.shape[-1])
    candidates = probabilities.topk(width, dim=-1).values
    thresholds = _threshold(candidates, masses)
    if width == probabilities.shape[-1]:
        return thresholds
    wide = torch.nonzero(candidates.sum(dim=-1) < masses)[:, 0]
    if wide.numel():
        everything = probabilities[wide].sort(dim=-1, descending=True).values
        thresholds[wide] = _threshold(everything, masses[wide])
    return thresholds


def _threshold(descending: torch.Tensor, masses: torch.Tensor) -> torch.Tensor:
    """The last of the descending probabilities [B, N] that is needed to reach masses [B]."""
    before = descending.cumsum(dim=-1) - descending
    num_kept = (before < masses[:, None]).sum(dim=-1).clamp(min=1)
    return descending.gather(1, num_kept[:, None] - 1)[:, 0]


def _drop_below(logits: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < thresholds[:, None], float("-inf"))
