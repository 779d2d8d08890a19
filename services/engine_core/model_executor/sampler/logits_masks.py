"""Rules that forbid or favour tokens: allowed ids, bad words, logit bias, min_tokens. Only rows with rules are touched.

Owner: the busy-loop thread. Changes the logits in place.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_core.model_executor.sampler.sampling_batch import RuledRow

_FORBIDDEN = float("-inf")


def apply_logits_masks(logits: torch.Tensor, ruled_rows: list[RuledRow]) -> None:
    """logits: float32 [B, V]. Order: allowed ids, bad words, logit bias, ids masked below min_tokens."""
    for ruled in ruled_rows:
        row, rules = logits[ruled.row], ruled.rules
        if rules.allowed_token_ids is not None:
            _keep_only(row, rules.allowed_token_ids)
        banned = _banned_ids(ruled)
        if banned.size or rules.bias_token_ids.size:
            _ban_and_bias(row, banned, ruled)


def _keep_only(row: torch.Tensor, token_ids: np.ndarray) -> None:
    kept = torch.from_numpy(token_ids).to(row.device)
    values = row[kept]
    row.fill_(_FORBIDDEN)
    row[kept] = values


def _ban_and_bias(row: torch.Tensor, banned: np.ndarray, ruled: RuledRow) -> None:
    rules = ruled.rules
    if rules.bias_token_ids.size:
        bias = torch.from_numpy(rules.bias_values).to(row.device)
        row.index_add_(0, torch.from_numpy(rules.bias_token_ids).to(row.device), bias)
    # After the bias: nothing lifts a ban. A ban of all that is left would leave no token at all, and is dropped.
    masked = row.index_fill(0, torch.from_numpy(banned).to(row.device), _FORBIDDEN)
    if masked.max() > _FORBIDDEN:
        row.copy_(masked)


def _banned_ids(ruled: RuledRow) -> np.ndarray:
    rules, output = ruled.rules, ruled.output_token_ids
    banned = [word[-1] for word in rules.bad_words if _ends_with(output, word[:-1])]
    if output.size < rules.min_tokens:
        return np.concatenate([np.array(banned, dtype=np.int64), rules.min_tokens_masked_ids])
    return np.array(banned, dtype=np.int64)


def _ends_with(output: np.ndarray, prefix: tuple[int, ...]) -> bool:
    """Whether the prefix of a bad word has just been written."""
    if len(prefix) > output.size:
        return False
    return not prefix or output[-len(prefix) :].tolist() == list(prefix)
