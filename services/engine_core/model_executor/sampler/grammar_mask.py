"""Forbids the tokens that the grammars of some rows do not allow. Only rows with a grammar are touched.

Owner: the busy-loop thread. Changes the logits in place, on whichever device they are.
"""

from __future__ import annotations

import torch

from engine_core.model_executor.sampler.sampling_batch import GrammarRows

_WORD_BITS = 32


def apply_grammar_mask(logits: torch.Tensor, grammar: GrammarRows) -> None:
    """logits: [B, V] of any float type."""
    rows = torch.from_numpy(grammar.rows).to(logits.device)
    words = torch.from_numpy(grammar.words).to(logits.device)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    shifts = (token_ids % _WORD_BITS).to(torch.int32)
    # [R, V]; an arithmetic shift copies the sign, and the lowest bit is the one that counts.
    is_allowed = (words[:, token_ids // _WORD_BITS] >> shifts) & 1
    logits[rows] = logits[rows].masked_fill(is_allowed == 0, float("-inf"))
