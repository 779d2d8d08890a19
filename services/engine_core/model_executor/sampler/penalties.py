"""Repetition, frequency and presence penalties. Only rows with penalties are touched.

Owner: the busy-loop thread. Changes the logits in place. Counts anew each step from the known tokens: no state that a
preemption or a resumed request could leave wrong.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_core.model_executor.sampler.sampling_batch import RuledRow


def apply_penalties(logits: torch.Tensor, ruled_rows: list[RuledRow]) -> None:
    """logits: float32 [B, V]. Repetition counts prompt and output; frequency and presence count output only."""
    for ruled in ruled_rows:
        rules = ruled.rules
        if rules.repetition_penalty != 1:
            seen = np.concatenate([ruled.prompt_token_ids, ruled.output_token_ids])
            _repetition(logits[ruled.row], np.unique(seen), rules.repetition_penalty)
        if (rules.presence_penalty != 0 or rules.frequency_penalty != 0) and ruled.output_token_ids.size:
            token_ids, counts = np.unique(ruled.output_token_ids, return_counts=True)
            cost = rules.frequency_penalty * counts + rules.presence_penalty
            _subtract(logits[ruled.row], token_ids, cost)


def _repetition(row: torch.Tensor, token_ids: np.ndarray, penalty: float) -> None:
    """Makes a seen token less likely whichever sign its logit has."""
    ids = torch.from_numpy(token_ids).to(row.device)
    values = row[ids]
    row[ids] = torch.where(values > 0, values / penalty, values * penalty)


def _subtract(row: torch.Tensor, token_ids: np.ndarray, cost: np.ndarray) -> None:
    ids = torch.from_numpy(token_ids).to(row.device)
    row[ids] -= torch.from_numpy(cost.astype(np.float32)).to(row.device)
