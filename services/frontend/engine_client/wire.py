"""Protobuf to dataclasses and back for the engine-core stream. Pure functions, no I/O.

Nothing of the wire leaves `engine_client`, except the EngineCoreRequest that `input_processor` builds.
"""

from __future__ import annotations

import grpc

from frontend.abort_kind import AbortKind
from frontend.engine_client.engine_facts import EngineFacts, EngineLoad, EngineState
from frontend.engine_outputs import EngineEvent, EngineFinish, EngineFinishReason, EngineOutput
from frontend.retry_advice import RETRY_AFTER_MS
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    StepwireError,
    UnavailableError,
)
from stepwire.grpc_errors import is_retryable, status_code
from stepwire.packed_logprobs import PackedLogprobs
from stepwire.v1 import common_pb2

_CAUSE_PREFIX = "ENGINE_DEATH_CAUSE_"
_FINISH_REASONS = {
    pb.ENGINE_FINISH_REASON_STOP: EngineFinishReason.STOP,
    pb.ENGINE_FINISH_REASON_LENGTH: EngineFinishReason.LENGTH,
    pb.ENGINE_FINISH_REASON_ABORTED: EngineFinishReason.ABORTED,
    pb.ENGINE_FINISH_REASON_ERROR: EngineFinishReason.ERROR,
    pb.ENGINE_FINISH_REASON_REJECTED: EngineFinishReason.REJECTED,
    pb.ENGINE_FINISH_REASON_REPETITION: EngineFinishReason.REPETITION,
}
_EVENTS = {
    pb.EVENT_TYPE_QUEUED: EngineEvent.QUEUED,
    pb.EVENT_TYPE_SCHEDULED: EngineEvent.SCHEDULED,
    pb.EVENT_TYPE_PREEMPTED: EngineEvent.PREEMPTED,
    pb.EVENT_TYPE_RESUMED: EngineEvent.RESUMED,
    pb.EVENT_TYPE_FIRST_TOKEN: EngineEvent.FIRST_TOKEN,
}
# Feature of a Ready.
_POOLING = "pooling:"
_ABORT_REASONS = {
    AbortKind.CLIENT_CANCELLED: pb.ABORT_REASON_CLIENT_CANCELLED,
    AbortKind.DEADLINE: pb.ABORT_REASON_DEADLINE,
    AbortKind.STOP_STRING: pb.ABORT_REASON_STOP_STRING,
    AbortKind.SLOW_CLIENT: pb.ABORT_REASON_SLOW_CLIENT,
    AbortKind.SHUTDOWN: pb.ABORT_REASON_SHUTDOWN,
    AbortKind.FRONTEND_ERROR: pb.ABORT_REASON_FRONTEND_ERROR,
    AbortKind.REQUESTED: pb.ABORT_REASON_REQUESTED,
}
_ERROR_CLASSES: dict[int, type[StepwireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: OverloadedError,
    grpc.StatusCode.UNAVAILABLE.value[0]: UnavailableError,
}


def to_abort_reason(kind: AbortKind) -> pb.AbortReason.ValueType:
    """The label of an abort on the wire."""
    return _ABORT_REASONS[kind]


def to_facts(ready: pb.Ready) -> EngineFacts:
    """The facts of a Ready."""
    return EngineFacts(
        engine_id=ready.engine_id,
        boot_id=ready.boot_id,
        model=ready.model,
        revision=ready.revision,
        tokenizer_sha256=ready.tokenizer_sha256,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        architecture=ready.architecture,
        dtype=ready.dtype,
        block_size=ready.block_size,
        kv_cache_tokens=ready.kv_cache_tokens,
        max_num_seqs=ready.max_num_seqs,
        max_logprobs=ready.max_logprobs,
        version=ready.version,
        weight_version=ready.weight_version,
        ping_interval_s=ready.ping_interval_ms / 1000,
        ping_timeout_s=ready.ping_timeout_ms / 1000,
        state=to_state(ready.state),
        structured_output_kinds=tuple(ready.structured_output_kinds),
        data_parallel_rank=ready.data_parallel_rank,
        data_parallel_size=max(1, ready.data_parallel_size),
        has_priorities="priority" in ready.features,
        is_tracing="tracing" in ready.features,
        embedding_dimensions=ready.embedding_dimensions,
        pooling=next((one.removeprefix(_POOLING) for one in ready.features if one.startswith(_POOLING)), ""),
        num_blocks=ready.num_blocks,
    )


def to_state(value: int) -> EngineState:
    """An engine state; one that a newer engine may have invented is UNSPECIFIED, which is not serving."""
    try:
        return EngineState(value)
    except ValueError:
        return EngineState.UNSPECIFIED


def to_load(stats: pb.SchedulerStats) -> EngineLoad:
    """The load of a stats snapshot."""
    return EngineLoad(
        running=stats.running,
        waiting=stats.waiting,
        waiting_tokens=stats.waiting_tokens,
        waiting_deferred=stats.waiting_deferred,
        kv_blocks_used=stats.kv_blocks_used,
        kv_blocks_total=stats.kv_blocks_total,
        prefix_query_tokens=stats.prefix_query_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        preemptions=stats.preemptions,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        num_frontends=max(1, stats.frontends),
    )


def to_outputs(batch: pb.EngineCoreOutputs) -> list[EngineOutput]:
    """All news of one batch. Raises ValueError when the parallel arrays differ in length."""
    stamp = batch.monotonic_ns
    outputs = [
        EngineOutput(handle, (token_id,), None, (), None, stamp)
        for handle, token_id in zip(batch.handles, batch.token_ids, strict=True)
    ]
    outputs.extend(_to_output(output, stamp) for output in batch.outputs)
    return outputs


def _to_output(output: pb.RequestOutput, stamp: int) -> EngineOutput:
    return EngineOutput(
        handle=output.handle,
        new_token_ids=tuple(output.new_token_ids),
        finish=_to_finish(output.finish) if output.HasField("finish") else None,
        # Kinds of events that a newer engine may have added are not ours to understand.
        events=tuple((_EVENTS[event.type], event.monotonic_ns) for event in output.events if event.type in _EVENTS),
        cached_prompt_tokens=output.prefill.local_cached_tokens if output.HasField("prefill") else None,
        monotonic_ns=stamp,
        logprobs=_to_rows(output.logprobs) if output.HasField("logprobs") else None,
        prompt_logprobs=_to_rows(output.prompt_logprobs) if output.HasField("prompt_logprobs") else None,
        pooled=output.pooled,
    )


def _to_rows(message: pb.Logprobs) -> PackedLogprobs:
    return PackedLogprobs(message.width, message.token_ids, message.logprobs, message.ranks)


def _to_finish(finish: pb.Finish) -> EngineFinish:
    # A reason that is not known here still ends the request: one answer for each, whatever happens.
    reason = _FINISH_REASONS.get(finish.reason, EngineFinishReason.ERROR)
    needs_error = reason in (EngineFinishReason.ERROR, EngineFinishReason.REJECTED)
    return EngineFinish(
        reason=reason,
        stop_token_id=finish.stop_token_id if finish.HasField("stop_token_id") else None,
        error=to_error(finish.error) if needs_error else None,
        preemptions=finish.preemptions,
    )


def to_error(error: common_pb2.EngineError) -> StepwireError:
    """The exception of a typed engine failure."""
    cls = _ERROR_CLASSES.get(error.grpc_code, RequestFailedError)
    advice = RETRY_AFTER_MS if cls in (OverloadedError, UnavailableError) else 0
    return cls(
        error.message or "the engine gave no reason",
        reason=error.reason or RequestFailedError.default_reason,
        retry_after_ms=error.retry_after_ms or advice,
        retryable=error.retryable,
    )


def to_engine_error(error: StepwireError) -> common_pb2.EngineError:
    """An error that arose on this side, as an engine would have stated it."""
    return common_pb2.EngineError(
        reason=error.reason,
        message=error.message,
        grpc_code=status_code(error.reason).value[0],
        retryable=is_retryable(error),
        retry_after_ms=error.retry_after_ms,
        cause_type=error.cause_type if isinstance(error, EngineDeadError) else "",
    )


# Of an engine that announces its death, as EngineDeadError has them.
DEATH_CAUSES = tuple(name.removeprefix(_CAUSE_PREFIX) for name, _ in pb.EngineDeathCause.items())


def to_death(dead: pb.EngineDead) -> EngineDeadError:
    """The exception of an engine that announced its death."""
    cause = pb.EngineDeathCause.Name(dead.cause) if dead.cause in pb.EngineDeathCause.values() else str(dead.cause)
    error = EngineDeadError(
        f"the engine died: {dead.message or 'it gave no message'}",
        kind="reported",
        cause=cause.removeprefix(_CAUSE_PREFIX),
        cause_type=dead.cause_type,
        boot_id=dead.boot_id,
        last_step=dead.last_step,
        report_id=dead.report_id,
    )
    error.retry_after_ms = RETRY_AFTER_MS
    return error


def to_loss(kind: str, boot_id: str, detail: str) -> EngineDeadError:
    """The exception of an engine that went without a word; `kind` is transport or heartbeat."""
    error = EngineDeadError(f"the engine was lost: {detail}", kind=kind, boot_id=boot_id)
    error.retry_after_ms = RETRY_AFTER_MS
    return error
