"""What frontends ask of sequences, from protobuf to what the scheduler knows. Pure.

Runs in input threads and never touches the scheduler.
"""

from __future__ import annotations

import json

from engine_core.scheduler.grammar import GrammarSpec
from engine_core.scheduler.pooling import PoolingParams
from engine_core.scheduler.request import (
    LogprobsParams,
    RepetitionDetection,
    Request,
    SamplingParams,
    StopConditions,
)
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.tracing import trace_id_of
from stepwire.v1 import common_pb2

# A day: what is older is a broken clock, and must not break the numbers of others.
_MAX_AGE_US = 86_400_000_000
_ABORT_REASONS: dict[int, str] = {
    value: name.removeprefix("ABORT_REASON_").lower() for name, value in pb.AbortReason.items()
}


def decode_request(session_id: str, message: pb.EngineCoreRequest, now: float) -> Request:
    """One sequence as the scheduler wants it. Raises ValueError for a token array that is none."""
    return Request(
        key=(session_id, message.handle),
        request_id=message.request_id,
        trace_id=trace_id_of(message.traceparent),
        prompt_token_ids=token_array.unpack(message.prompt_token_ids),
        output_token_ids=token_array.unpack(message.resume_output_token_ids),
        sampling=_decode_sampling(message.sampling),
        stop=_decode_stop(message),
        arrival_time=now - min(message.age_us, _MAX_AGE_US) / 1e6,
        deadline=_decode_deadline(message.deadline_in_us, now),
        queue_deadline=_decode_deadline(message.queue_deadline_in_us, now),
        cache_salt=message.cache_salt,
        bypass_prefix_cache=message.bypass_prefix_cache,
        priority=message.priority,
        client_class=message.client_class,
        logprobs=_decode_logprobs(message),
        grammar_spec=_decode_grammar(message.structured_output) if message.HasField("structured_output") else None,
        pooling=_decode_pooling(message.pooling) if message.HasField("pooling") else None,
    )


def _decode_pooling(message: pb.PoolingParams) -> PoolingParams:
    return PoolingParams(
        task=message.task,
        is_normalized=message.normalize if message.HasField("normalize") else None,
        num_dimensions=message.dimensions if message.HasField("dimensions") else None,
    )


def _decode_deadline(in_us: int, now: float) -> float | None:
    return now + in_us / 1e6 if in_us else None


def _decode_logprobs(message: pb.EngineCoreRequest) -> LogprobsParams:
    return LogprobsParams(
        num_output=message.logprobs if message.HasField("logprobs") else None,
        num_prompt=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        chosen_token_ids=tuple(message.logprob_token_ids),
    )


def _decode_sampling(message: pb.EngineSamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        logit_bias=tuple(zip(message.logit_bias_token_ids, message.logit_bias_values, strict=True)),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(bad_word.ids) for bad_word in message.bad_words),
    )


def _decode_grammar(message: common_pb2.StructuredOutput) -> GrammarSpec:
    kind = message.WhichOneof("spec")
    match kind:
        case None:
            raise ValueError("structured_output.spec: no kind of constraint that this engine knows")
        case "json_object":
            return GrammarSpec(kind, "")
        case "choice":
            return GrammarSpec(kind, json.dumps(list(message.choice.choices)))
        case _:
            return GrammarSpec(kind, getattr(message, kind))


def _decode_stop(message: pb.EngineCoreRequest) -> StopConditions:
    detection = message.repetition_detection
    repetition = RepetitionDetection(detection.max_pattern_tokens, detection.min_pattern_tokens, detection.min_repeats)
    return StopConditions(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        eos_token_ids=frozenset(message.eos_token_ids),
        ignore_eos=message.ignore_eos,
        repetition=repetition if detection.max_pattern_tokens else None,
    )


def decode_abort_reason(reason: pb.AbortReason.ValueType) -> str:
    """Label of the aborted counter; a reason that only a newer frontend knows is unspecified."""
    return _ABORT_REASONS.get(reason, "unspecified")
