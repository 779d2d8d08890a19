"""From logits to one token a row: rules, penalties, arg-max or a draw by inverse CDF.

Owner: the busy-loop thread. Has no state, so a row's token depends on its logits and its own parameters only. Reading
the tokens is the one wait for the device in a step; rows that need no more than an arg-max get no more.
"""

from __future__ import annotations

import numpy as np
import torch

from engine_core.model_executor.host_to_device import on_device
from engine_core.model_executor.sampler.arg_max import arg_max
from engine_core.model_executor.sampler.draw import NOT_COVERED, Draws, draw, draw_from_all
from engine_core.model_executor.sampler.grammar_mask import apply_grammar_mask
from engine_core.model_executor.sampler.logits_masks import apply_logits_masks
from engine_core.model_executor.sampler.penalties import apply_penalties
from engine_core.model_executor.sampler.sampling_batch import SamplingBatch


def sample(logits: torch.Tensor, batch: SamplingBatch | None) -> np.ndarray:
    """logits [B, V] of any float type, which this may overwrite -> token ids int64 [B] on the host.

    `batch` None: the likeliest token of every row, of equal ones that with the lowest id.
    """
    if batch is None:
        return _read(arg_max(logits))
    is_whole = len(batch.rows) == len(logits)
    ruled = _apply_rules(logits if is_whole else logits[on_device(batch.rows, logits.device)], batch)
    token_ids = _choose(ruled, batch)
    if not is_whole:
        chosen, token_ids = token_ids, arg_max(logits)
        token_ids[on_device(batch.rows, logits.device)] = chosen
    host_ids = _read(token_ids)
    missing = np.flatnonzero(host_ids == NOT_COVERED)
    if missing.size:
        host_ids[missing] = _read(_draw_again(ruled, batch, np.searchsorted(batch.rows, missing)))
    return host_ids


def _apply_rules(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits [R, V] of the batch's rows -> the same after grammars, masks and penalties: float32 if there are any."""
    if batch.grammar is None and not batch.ruled_rows:
        return logits
    logits = logits.float()
    if batch.grammar is not None:
        # First of all rules: what the grammar forbids stays forbidden, and the bans that can be dropped are others.
        apply_grammar_mask(logits, batch.grammar)
    apply_logits_masks(logits, batch.ruled_rows)
    apply_penalties(logits, batch.ruled_rows)
    return logits


def _choose(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Arg-max or draw, [R]."""
    rows = np.flatnonzero(batch.params["temperature"] > 0)
    if rows.size == len(logits):
        return draw(logits, Draws.of(batch.params, batch.token_indices))
    token_ids = arg_max(logits)
    if rows.size:
        index = on_device(rows, logits.device)
        token_ids[index] = draw(logits[index], Draws.of(batch.params[rows], batch.token_indices[rows]))
    return token_ids


def _draw_again(logits: torch.Tensor, batch: SamplingBatch, rows: np.ndarray) -> torch.Tensor:
    index = on_device(rows, logits.device)
    return draw_from_all(logits[index], Draws.of(batch.params[rows], batch.token_indices[rows]))


def _read(token_ids: torch.Tensor) -> np.ndarray:
    return token_ids.cpu().numpy()
