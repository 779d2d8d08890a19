"""What a request must produce, worked out alone: no cache, no batch, no scheduler.

The "model" is a pure function of the seed and all known tokens, so recomputation, prefix hits and neighbours must not
show in the output. The stop rules are a second, slow writing of the specification.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine_core.scheduler.output import FinishReason, NewRequestData
from engine_core.scheduler.request import StopConditions

# Small, so that eos and stop ids come up.
VOCAB_SIZE = 9


def next_token_of(seed: int, token_ids: Sequence[int]) -> int:
    """The token after these, for a request with this seed."""
    return zlib.crc32(array("q", [seed, *token_ids]).tobytes()) % VOCAB_SIZE


def next_token(data: NewRequestData, token_ids: list[int]) -> int:
    """The same, as a ShadowWorker asks for it."""
    return next_token_of(data.sampling.seed, token_ids)


@dataclass(frozen=True)
class Answer:
    """A whole generation: every output token and how it ends."""

    output_token_ids: list[int]
    reason: FinishReason
    stop_token_id: int | None = None


def generate(prompt: list[int], seed: int, stop: StopConditions, max_model_len: int) -> Answer:
    """Run one request to its end."""
    output: list[int] = []
    while True:
        token_id = next_token_of(seed, [*prompt, *output])
        output.append(token_id)
        if len(output) < stop.min_tokens:
            continue
        if token_id in stop.eos_token_ids and not stop.ignore_eos:
            return Answer(output, FinishReason.STOP)
        if token_id in stop.stop_token_ids:
            return Answer(output, FinishReason.STOP, token_id)
        if len(prompt) + len(output) >= max_model_len or len(output) >= stop.max_tokens:
            return Answer(output, FinishReason.LENGTH)
