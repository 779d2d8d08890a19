"""Forbids the tokens that the grammars of some rows do not allow. Only rows with a grammar are touched.

Owner: the busy-loop thread. Changes the logits in place, on whichever device they are.
"""

from __future__ import annotations

import numpy as np
import torch
import xgrammar

from engine_core.model_executor.sampler.sampling_batch import GrammarRows


def apply_grammar_mask(logits: torch.Tensor, grammar: GrammarRows) -> None:
    """logits: float32 [B, V]."""
    # The library's kernels want the mask of row i at index i; rows that are not named are not read.
    words = np.zeros((logits.shape[0], grammar.words.shape[1]), dtype=np.int32)
    words[grammar.rows] = grammar.words
    bitmask = torch.from_numpy(words).to(logits.device)
    xgrammar.apply_token_bitmask_inplace(logits, bitmask, indices=grammar.rows.tolist())
