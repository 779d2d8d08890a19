"""From logits to one token a row: rules, penalties, arg-max or a draw by inverse CDF.

Owner: the busy-loop thread. Has no state, so a row's token depends on its logits and its own parameters only.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_core.model_executor.sampler.grammar_mask import apply_grammar_mask
from engine_core.model_executor.sampler.logits_masks import apply_logits_masks
from engine_core.model_executor.sampler.penalties import apply_penalties
from engine_core.model_executor.sampler.sampling_batch import SamplingBatch
from engine_core.model_executor.sampler.top_k_top_p import apply_min_p, apply_top_k, apply_top_p
from engine_core.model_executor.sampler.uniform import uniform


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits [B, V] of any float type, which this may overwrite -> token ids int64 [B] on the same device."""
    random_rows = np.flatnonzero(batch.params["temperature"] > 0)
    if not batch.ruled_rows and not random_rows.size and batch.grammar is None:
        return logits.argmax(dim=-1)
    logits = logits.float()
    if batch.grammar is not None:
        # First of all rules: what the grammar forbids stays forbidden, and the bans that can be dropped are others.
        apply_grammar_mask(logits, batch.grammar)
    apply_logits_masks(logits, batch.ruled_rows)
    apply_penalties(logits, batch.ruled_rows)
    token_ids = logits.argmax(dim=-1)
    if random_rows.size:
        rows = torch.from_numpy(random_rows).to(logits.device)
        token_ids[rows] = _draw(logits[rows], batch.params[random_rows], batch.token_indices[random_rows])
    return token_ids


def _draw(logits: torch.Tensor, params: np.ndarray, token_indices: np.ndarray) -> torch.Tensor:
    """logits float32 [R, V] -> token ids [R]. In float64, so that a sum over the vocabulary is exact enough."""
    temperatures = torch.from_numpy(params["temperature"].copy()).to(logits.device)
    scaled = logits.double() / temperatures[:, None]
    apply_min_p(scaled, params["min_p"])
    apply_top_k(scaled, params["top_k"])
    apply_top_p(scaled, params["top_p"])
    numbers = torch.from_numpy(uniform(params["seed"], token_indices)).to(logits.device)
    return invert_cdf(scaled.softmax(dim=-1), numbers)


def invert_cdf(probabilities: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first token, in id order, where the cumulative probability exceeds the number; float64 [R, V], [R] -> [R].

    Never a token of probability 0: such tokens are left out explicitly, because a parallel sum may wobble in its last
    digit. A number so near 1 that rounding leaves no token takes the last possible one.
    """
    cumulative = probabilities.cumsum(dim=-1)
    possible = probabilities > 0
    beyond = (cumulative > (numbers * cumulative[:, -1])[:, None]) & possible
    # Of equal maxima, argmax takes the first.
    first = beyond.to(torch.uint8).argmax(dim=-1)
    last_possible = possible.shape[-1] - 1 - possible.flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.where(beyond.any(dim=-1), first, last_possible)
