"""Vectors of prompts, from the hidden states of their tokens behind the final norm, chunk by chunk.

Owner: the thread that runs the model. What a request has gathered lives in the worker as long as the request; after a
preemption its prompt comes again from the start, and the gathering with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from engine_core.model_executor.step_inputs import StepInputs
from engine_core.scheduler.output import NewRequestData
from engine_core.scheduler.pooling import PoolingParams, PoolingType
from engine_core.scheduler.request import RequestKey
from stepwire.errors import InvariantViolation


class Pooler:
    """Of one request: `take` every chunk of the prompt in order; `vector` behind the last."""

    def __init__(self, params: PoolingParams) -> None:
        self._params = params
        self._num_taken = 0
        # [n]: float64 for a sum, so that it matters little how the prompt was cut.
        self._gathered: torch.Tensor | None = None

    def take(self, hidden: torch.Tensor, start: int) -> None:
        """hidden [N, n] of the tokens from `start` on."""
        if self._params.needs_all_tokens and start not in (0, self._num_taken):
            raise InvariantViolation(f"pooling got tokens from {start} on behind the first {self._num_taken}")
        match self._params.type:
            case PoolingType.MEAN:
                total = hidden.sum(dim=0, dtype=torch.float64)
                self._gathered = total if start == 0 or self._gathered is None else self._gathered + total
            case PoolingType.CLS if start == 0:
                self._gathered = hidden[0].to(torch.float32, copy=True)
            case PoolingType.LAST:
                # Of the last chunk, whichever that is. A copy, because the next step may write there.
                self._gathered = hidden[-1].to(torch.float32, copy=True)
        self._num_taken = start + len(hidden)

    def vector(self) -> bytes:
        """float32, little-endian: of all dimensions or the first ones, of unit length if that is asked for."""
        if self._gathered is None:
            raise InvariantViolation("a vector of no tokens")
        is_mean = self._params.type is PoolingType.MEAN
        vector = self._gathered / self._num_taken if is_mean else self._gathered
        vector = vector[: self._params.num_dimensions]
        if self._params.is_normalized:
            vector = torch.nn.functional.normalize(vector, dim=0)
        return vector.cpu().numpy().astype("<f4").tobytes()


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """The tokens [first_token, end_token) of a flattened batch are those of one request from `start` on."""

    key: RequestKey
    pooler: Pooler
    first_token: int
    end_token: int
    start: int
    # The prompt is complete with it.
    is_last: bool


class PoolingRows:
    """The poolers of requests by their row in the worker's record; false when there are none."""

    def __init__(self) -> None:
        self._poolers: dict[int, Pooler] = {}

    def __bool__(self) -> bool:
        return bool(self._poolers)

    def add(self, row: int, new: NewRequestData) -> None:
        if new.pooling is not None:
            self._poolers[row] = Pooler(new.pooling)

    def remove(self, row: int) -> None:
        self._poolers.pop(row, None)

    def are_in(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows [S] pool."""
        return np.isin(rows, list(self._poolers))

    def chunks(self, inputs: StepInputs, num_known: np.ndarray) -> list[PooledChunk]:
        """What a step computes of them; `num_known` by row."""
        bounds, seq_lens = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
        return [
            PooledChunk(
                key=inputs.keys[index],
                pooler=self._poolers[row],
                first_token=bounds[index],
                end_token=bounds[index + 1],
                start=seq_lens[index] - (bounds[index + 1] - bounds[index]),
                is_last=seq_lens[index] == int(num_known[row]),
            )
            for index, row in enumerate(inputs.rows.tolist())
            if row in self._poolers
        ]


def pool(chunks: Iterable[PooledChunk], hidden_states: torch.Tensor) -> dict[RequestKey, bytes]:
    """hidden_states [T, n] of the step -> the vectors of the prompts that are complete."""
    vectors: dict[RequestKey, bytes] = {}
    for chunk in chunks:
        chunk.pooler.take(hidden_states[chunk.first_token : chunk.end_token], chunk.start)
        if chunk.is_last:
            vectors[chunk.key] = chunk.pooler.vector()
    return vectors
