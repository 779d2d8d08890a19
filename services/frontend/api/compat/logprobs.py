"""Packed log-probabilities in vLLM's shape: parallel lists, and one list of the best for each position. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from stepwire.packed_logprobs import PackedLogprobs

_Row = tuple[int, float, Any]


def to_output_logprobs(parts: Sequence[PackedLogprobs], num_top: int) -> Any:
    """One entry for each output token."""
    message = pb.OutputLogProbs()
    for token_id, logprob, top in _rows(parts, num_top):
        message.token_ids.append(token_id)
        message.token_logprobs.append(logprob)
        message.top_logprobs.append(top)
    return message


def to_input_logprobs(prompt_token_ids: Sequence[int], parts: Sequence[PackedLogprobs], num_top: int) -> Any:
    """One entry for each prompt token; the first has none, because nothing precedes it."""
    message = pb.InputLogProbs(
        token_ids=prompt_token_ids, token_logprobs=[pb.InputTokenLogProb()], top_logprobs=[pb.TopLogProbs()]
    )
    for _, logprob, top in _rows(parts, num_top):
        message.token_logprobs.add(value=logprob)
        message.top_logprobs.append(top)
    return message


def _rows(parts: Sequence[PackedLogprobs], num_top: int) -> Iterator[_Row]:
    for part in parts:
        token_ids, logprobs, _ = part.unpack()
        for start in range(0, len(token_ids), part.width):
            best = slice(start + 1, start + 1 + num_top)
            yield token_ids[start], logprobs[start], pb.TopLogProbs(token_ids=token_ids[best], values=logprobs[best])
