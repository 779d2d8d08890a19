"""Repetition, frequency and presence penalties. Only rows with penalties are touched, and in them only seen tokens.

Owner: the busy-loop thread. Changes the logits in place: one gather and one scatter for all rows of a step.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_core.model_executor.host_to_device import on_device
from engine_core.model_executor.sampler.sampling_batch import RuledRow
from engine_core.model_executor.sampler.token_counts import TokenCounts


def apply_penalties(logits: torch.Tensor, ruled_rows: list[RuledRow]) -> None:
    """logits: float32 [B, V]. Repetition counts prompt and output; frequency and presence count output only."""
    penalized = [(ruled, ruled.counts) for ruled in ruled_rows if ruled.counts is not None]
    if not penalized:
        return
    for ruled, counts in penalized:
        counts.follow(ruled.output_token_ids)
    lengths = [len(counts.token_ids) for _, counts in penalized]
    rows = np.repeat(np.array([ruled.row for ruled, _ in penalized], dtype=np.int64), lengths)
    token_ids = np.concatenate([counts.token_ids for _, counts in penalized])
    places = on_device(rows * logits.shape[-1] + token_ids, logits.device)
    factors = np.array([ruled.rules.repetition_penalty for ruled, _ in penalized], dtype=np.float32)
    repetition = on_device(np.repeat(factors, lengths), logits.device)
    costs = on_device(np.concatenate([_costs(ruled, counts) for ruled, counts in penalized]), logits.device)
    values = logits.view(-1)[places]
    # Less likely, whichever sign the logit has.
    values = torch.where(values > 0, values / repetition, values * repetition) - costs
    logits.view(-1)[places] = values


def _costs(ruled: RuledRow, counts: TokenCounts) -> np.ndarray:
    rules = ruled.rules
    costs: np.ndarray = rules.frequency_penalty * counts.counts + rules.presence_penalty * (counts.counts > 0)
    return costs.astype(np.float32)
