"""One token a row at random, by inverse CDF, within what min-p, top-k and top-p leave.

Owner: the busy-loop thread. Rows without truncation walk sums over the vocabulary. The others look at their few hundred
likeliest tokens, and at the mass of all; a row whose truncation leaves more is told apart, and drawn from everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine_core.model_executor.host_to_device import on_device
from engine_core.model_executor.sampler.candidates import NUM_CANDIDATES, Candidates, likeliest
from engine_core.model_executor.sampler.inverse_cdf import group_sums, invert_cdf, invert_wide_cdf
from engine_core.model_executor.sampler.top_k_top_p import apply_min_p, apply_top_k, apply_top_p
from engine_core.model_executor.sampler.uniform import uniform

# Instead of a token id: the candidates do not cover what the truncation leaves.
NOT_COVERED = -1
_CACHED_VALUES = 1 << 19
_FORBIDDEN = float("-inf")


@dataclass(frozen=True, slots=True)
class Draws:
    """How R rows are drawn."""

    # SAMPLING_DTYPE, [R]
    params: np.ndarray
    # Uniform numbers, float64 [R].
    numbers: np.ndarray

    @classmethod
    def of(cls, params: np.ndarray, token_indices: np.ndarray) -> Draws:
        return cls(params, uniform(params["seed"], token_indices))

    def of_rows(self, rows: np.ndarray | slice) -> Draws:
        return Draws(self.params[rows], self.numbers[rows])


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """logits [R, V] of any float type -> token ids [R], NOT_COVERED for those that `draw_from_all` has to draw."""
    num_rows, vocab_size = logits.shape
    # On a CPU as many rows as its caches hold: what is computed on the way is several times as large as the logits.
    size = max(1, _CACHED_VALUES // vocab_size) if logits.device.type == "cpu" else num_rows
    slices = [slice(start, start + size) for start in range(0, num_rows, size)]
    return torch.cat([_draw_slice(logits[rows].float(), draws.of_rows(rows)) for rows in slices])


def _draw_slice(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    is_truncated = (draws.params["top_k"] > 0) | (draws.params["top_p"] < 1)
    if logits.shape[-1] <= NUM_CANDIDATES or is_truncated.all():
        return _draw_from_candidates(logits, draws)
    if not is_truncated.any():
        return _draw_untruncated(logits, draws)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for method, part in ((_draw_untruncated, ~is_truncated), (_draw_from_candidates, is_truncated)):
        rows = np.flatnonzero(part)
        index = on_device(rows, logits.device)
        token_ids[index] = method(logits[index], draws.of_rows(rows))
    return token_ids


def draw_from_all(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """logits [R, V] -> token ids [R]: every rule over the whole vocabulary, in float64."""
    scaled = logits.double() / _column(draws.params["temperature"], logits)
    apply_min_p(scaled, draws.params["min_p"])
    apply_top_k(scaled, draws.params["top_k"])
    apply_top_p(scaled, draws.params["top_p"])
    return invert_cdf(scaled.softmax(dim=-1), on_device(draws.numbers, logits.device))


def _draw_untruncated(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Without top-k and top-p; min-p needs no order."""
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), draws)
    return invert_wide_cdf(weights, group_sums(weights), on_device(draws.numbers, logits.device))


def _draw_from_candidates(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    candidates = likeliest(logits)
    temperatures = _column(draws.params["temperature"], logits)
    scaled, bounds = candidates.logits / temperatures, candidates.bounds / temperatures[:, 0]
    apply_min_p(scaled, draws.params["min_p"])
    apply_top_k(scaled, draws.params["top_k"])
    outside = _mass_outside(logits, draws, candidates)
    # What is left by now of tokens that are no candidates is known only where top-k does not count them.
    is_known = _is_covered(scaled, bounds) | on_device(_is_unlimited(draws, logits), logits.device)
    if outside is not None:
        outside = torch.where(_is_covered(scaled, bounds), 0.0, outside)
    apply_top_p(scaled, draws.params["top_p"], outside)
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()
    places = invert_cdf(weights, on_device(draws.numbers, logits.device))
    token_ids = candidates.token_ids.gather(1, places[:, None])[:, 0]
    return torch.where(_is_covered(scaled, bounds) & is_known, token_ids, NOT_COVERED)


def _is_covered(scaled: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Whether all that is left is above the bound of the other tokens, so that they would have been dropped too."""
    least = scaled.masked_fill(scaled == _FORBIDDEN, float("inf")).amin(dim=-1)
    return (least > bounds) | (bounds == _FORBIDDEN)


def _mass_outside(logits: torch.Tensor, draws: Draws, candidates: Candidates) -> torch.Tensor | None:
    """Weight of the tokens that are no candidates, float64 [R], where that of the likeliest one is 1.

    Of rows whose min-p drops no candidate and whose top-k drops nothing; None when there are no such rows with top-p.
    """
    asks = (draws.params["top_p"] < 1) & _is_unlimited(draws, logits)
    if logits.shape[-1] <= NUM_CANDIDATES or not asks.any():
        return None
    maxima = candidates.logits.amax(dim=-1, keepdim=True)
    inside = ((candidates.logits - maxima) / _column(draws.params["temperature"], logits)).exp()
    total = group_sums(_weights(logits, maxima.float(), draws)).sum(dim=-1)
    return (total - inside.sum(dim=-1)).clamp(min=0)


def _is_unlimited(draws: Draws, logits: torch.Tensor) -> np.ndarray:
    """Whether top-k drops nothing of a row, [R]."""
    top_k = draws.params["top_k"]
    is_unlimited: np.ndarray = (top_k <= 0) | (top_k >= logits.shape[-1])
    return is_unlimited


def _weights(logits: torch.Tensor, maxima: torch.Tensor, draws: Draws) -> torch.Tensor:
    """float32 [R, V]: 1 for the likeliest token of a row, 0 below its min-p. maxima: float32 [R, 1]."""
    scales = _column((1 / draws.params["temperature"]).astype(np.float32), logits)
    weights = (logits - maxima).mul_(scales).exp_()
    min_p = draws.params["min_p"]
    if min_p.any():
        weights.masked_fill_(weights < _column(min_p.astype(np.float32), logits), 0)
    return weights


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """[R] -> [R, 1] on the device of the logits."""
    return on_device(np.ascontiguousarray(values), like.device)[:, None]
