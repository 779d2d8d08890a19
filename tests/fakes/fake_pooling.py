"""Vectors of a model that there is not: pooled, cut and scaled as a worker does it, from made-up hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine_core.scheduler.pooling import EMBED, PoolingParams, PoolingType
from stepwire.engine.v1 import engine_core_pb2

HIDDEN_SIZE = 6


def fake_hidden(token_ids: Sequence[int]) -> np.ndarray:
    """[T, HIDDEN_SIZE]: each row depends on its token and on all before it."""
    sums = np.cumsum(np.array(token_ids, dtype=np.float64))
    return np.stack([np.sin(sums * (1 + place)) for place in range(HIDDEN_SIZE)], axis=1)


def wire_vector(token_ids: Sequence[int], asked: engine_core_pb2.PoolingParams) -> bytes:
    """Of the last token, as an engine answers what a frontend has sent."""
    assert asked.task == EMBED
    return fake_vector(
        token_ids,
        PoolingParams(
            type=PoolingType.LAST,
            is_normalized=asked.normalize or not asked.HasField("normalize"),
            num_dimensions=asked.dimensions if asked.HasField("dimensions") else None,
        ),
    )


def fake_vector(token_ids: Sequence[int], params: PoolingParams) -> bytes:
    hidden = fake_hidden(token_ids)
    rows = {PoolingType.MEAN: hidden.mean(axis=0), PoolingType.CLS: hidden[0], PoolingType.LAST: hidden[-1]}
    assert params.type is not None
    vector = rows[params.type][: params.num_dimensions]
    if params.is_normalized:
        vector = vector / np.linalg.norm(vector)
    return vector.astype("<f4").tobytes()
