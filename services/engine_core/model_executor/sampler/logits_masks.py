"""Rules that forbid or favour tokens: allowed ids, bad words, logit bias, min_tokens. Only rows with rules are touched.

Owner: the busy-loop thread. Changes the logits in place.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_core.model_executor.host_to_device import on_device
from engine_core.model_executor.sampler.sampling_batch import RuledRow

_FORBIDDEN = float("-inf")


def apply_logits_masks(logits: torch.Tensor, ruled_rows: list[RuledRow]) -> None:
    """logits: float32 [B, V]. Order: allowed ids, bad words, logit bias, ids masked below min_tokens."""
    bans: list[tuple[int, np.ndarray]] = []
    for ruled in ruled_rows:
        row, rules = logits[ruled.row], ruled.rules
        if rules.allowed_token_ids is not None:
            _keep_only(row, rules.allowed_token_ids)
        if rules.bias_token_ids.size:
            bias = on_device(rules.bias_values, row.device)
            row.index_add_(0, on_device(rules.bias_token_ids, row.device), bias)
        banned = _banned_ids(ruled)
        if banned.size:
            bans.append((ruled.row, banned))
    if bans:
        # After the bias: nothing lifts a ban.
        _ban(logits, bans)


def _keep_only(row: torch.Tensor, token_ids: np.ndarray) -> None:
    kept = on_device(token_ids, row.device)
    values = row[kept]
    row.fill_(_FORBIDDEN)
    row[kept] = values


def _ban(logits: torch.Tensor, bans: list[tuple[int, np.ndarray]]) -> None:
    """All rows at once. A ban of all that is left in a row would leave no token at all, and is dropped."""
    numbers = np.repeat(np.arange(len(bans)), [len(token_ids) for _, token_ids in bans])
    rows = np.array([row for row, _ in bans], dtype=np.int64)
    token_ids = np.concatenate([token_ids for _, token_ids in bans])
    places = on_device(rows[numbers] * logits.shape[-1] + token_ids, logits.device)
    values = logits.view(-1)[places]
    logits.view(-1)[places] = _FORBIDDEN
    is_empty = logits[on_device(rows, logits.device)].amax(dim=-1) == _FORBIDDEN
    kept = torch.where(is_empty[on_device(numbers, logits.device)], values, _FORBIDDEN)
    logits.view(-1)[places] = kept


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
