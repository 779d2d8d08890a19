"""Vectors of a model that there is not: pooled, cut and scaled as a worker does it, from made-up hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_core.scheduler.pooling import PoolingParams, PoolingType

HIDDEN_SIZE = 6


def fake_hidden(token_ids: Sequence[int]) -> np.ndarray:
    """[T, HIDDEN_SIZE]: each row depends on its token and on all before it."""
    sums = np.cumsum(np.array(token_ids, dtype=np.float64))
    return np.stack([np.sin(sums * (1 + place)) for place in range(HIDDEN_SIZE)], axis=1)


def fake_vector(token_ids: Sequence[int], params: PoolingParams) -> bytes:
    hidden = fake_hidden(token_ids)
    rows = {PoolingType.MEAN: hidden.mean(axis=0), PoolingType.CLS: hidden[0], PoolingType.LAST: hidden[-1]}
    assert params.type is not None
    vector = rows[params.type][: params.num_dimensions]
    if params.is_normalized:
        vector = vector / np.linalg.norm(vector)
    return vector.astype("<f4").tobytes()
