"""Utility calls from protobuf and their results to protobuf: the part of the wire that is one pair for each operation.

Decoding runs in input threads, encoding in output threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from engine_core import operations as op
from engine_core import weight_operations as wop
from engine_core.messages import UtilityResult
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import InvalidRequestError, StepwireError
from stepwire.v1 import common_pb2
from stepwire.v1 import control_pb2 as control

_MODES = {control.PauseMode.Value(f"PAUSE_MODE_{mode.name}"): mode for mode in op.PauseMode}
_LEVELS = {control.SleepLevel.Value(f"SLEEP_LEVEL_{level.name}"): level for level in op.SleepLevel}
_TAGS = {control.WakeTag.Value(f"WAKE_TAG_{tag.name}"): tag for tag in op.WakeTag}
_MAX_UINT32 = 2**32 - 1

Member = TypeVar("Member")


# -- decoding ----------------------------------------------------------------------------------------------------------


def decode_operation(call: pb.UtilityCall) -> op.Operation:
    """The operation of a call. Raises StepwireError for one that is not known here, or can not be understood."""
    kind = call.WhichOneof("call")
    if kind is None:
        raise StepwireError("UtilityCall.call: this engine does not know the operation", reason="UNSUPPORTED_FEATURE")
    return _DECODERS[kind](getattr(call, kind))


def _pause(args: control.PauseArgs) -> op.Pause:
    return op.Pause(_member(_MODES, args.mode, "mode"), args.clear_cache)


def _sleep(args: control.SleepArgs) -> op.Sleep:
    mode = _member(_MODES, args.pause_mode, "pause_mode") if args.pause_mode else None
    return op.Sleep(_member(_LEVELS, args.level, "level"), mode)


def _wake_up(args: control.WakeUpArgs) -> op.WakeUp:
    return op.WakeUp(frozenset(_member(_TAGS, tag, "tags") for tag in args.tags))


def _update_weights(args: control.UpdateWeightsArgs) -> wop.UpdateWeights:
    pieces = tuple(
        wop.TensorPiece(tensor.name, tensor.dtype, tuple(tensor.shape), tensor.offset, tensor.data)
        for tensor in args.tensors
    )
    return wop.UpdateWeights(args.update_id, pieces, args.path)


def _member(members: dict[Any, Member], value: int, field: str) -> Member:
    if value not in members:
        raise InvalidRequestError(f"{field}: {value} is not a value that this engine knows")
    return members[value]


_DECODERS: dict[str, Callable[[Any], op.Operation]] = {
    "reset_prefix_cache": lambda args: op.ResetPrefixCache(args.reset_running_requests),
    "pause": _pause,
    "resume": lambda _: op.Resume(),
    "is_paused": lambda _: op.IsPaused(),
    "sleep": _sleep,
    "wake_up": _wake_up,
    "is_sleeping": lambda _: op.IsSleeping(),
    "start_profile": lambda args: op.StartProfile(args.num_steps, args.prefix),
    "stop_profile": lambda _: op.StopProfile(),
    "dump_state": lambda args: op.DumpState(args.include_requests, args.include_stacks),
    "check_health": lambda _: op.CheckHealth(),
    "get_supported_tasks": lambda _: op.GetSupportedTasks(),
    "get_kv_cache_metadata": lambda _: op.GetKVCacheMetadata(),
    "execute_dummy_batch": lambda args: op.ExecuteDummyBatch(args.num_tokens),
    "reset_encoder_cache": lambda _: op.ResetEncoderCache(),
    "reload_weights": lambda args: wop.ReloadWeights(args.path),
    "start_weight_update": lambda args: wop.StartWeightUpdate(args.version),
    "update_weights": _update_weights,
    "finish_weight_update": lambda args: wop.FinishWeightUpdate(args.update_id, args.discard),
    "get_weight_version": lambda _: wop.GetWeightVersion(),
    "drain": lambda args: op.Drain(args.timeout_ms / 1000 if args.timeout_ms else None, args.reason),
}


# -- encoding ----------------------------------------------------------------------------------------------------------


def encode_result(
    message: UtilityResult,
    encode_error: Callable[[Any], common_pb2.EngineError],
    state: common_pb2.EngineState.ValueType,
    boot_id: str,
) -> pb.UtilityResult:
    """One answer. `state` and `boot_id` are what a state dump adds to what the loop saw."""
    encoder = _ENCODERS.get(type(message.outcome))
    if encoder is None:
        return pb.UtilityResult(call_id=message.call_id, error=encode_error(message.outcome))
    kind, encode = encoder
    result = encode(message.outcome)
    if isinstance(result, control.DumpStateResult):
        result.state, result.boot_id = state, boot_id
    return pb.UtilityResult(call_id=message.call_id, **{kind: result})


def _is_paused(result: op.IsPausedResult) -> control.IsPausedResult:
    return control.IsPausedResult(
        paused=result.mode is not None and not result.is_pending,
        mode=_value(control.PauseMode, "PAUSE_MODE", result.mode),
        pending=result.is_pending,
    )


def _is_sleeping(result: op.IsSleepingResult) -> control.IsSleepingResult:
    return control.IsSleepingResult(
        sleeping=bool(result.asleep),
        level=_value(control.SleepLevel, "SLEEP_LEVEL", result.level),
        asleep=_tags(result.asleep),
    )


def _check_health(result: op.CheckHealthResult) -> control.CheckHealthResult:
    message = control.CheckHealthResult(healthy=all(worker.is_healthy for worker in result.workers))
    for worker in result.workers:
        message.workers.add(rank=worker.rank, healthy=worker.is_healthy, message=worker.message)
    return message


def _kv_cache_metadata(result: op.GetKVCacheMetadataResult) -> control.GetKvCacheMetadataResult:
    message = control.GetKvCacheMetadataResult(block_size=result.block_size, num_blocks=result.num_blocks)
    for group in result.groups:
        message.groups.add(
            kind="full" if group.sliding_window is None else "sliding_window",
            block_size=result.block_size,
            num_layers=group.num_layers,
            sliding_window=group.sliding_window,
        )
    return message


def _dump_state(dump: op.StateDump) -> control.DumpStateResult:
    result = control.DumpStateResult(
        step=dump.step,
        kv_blocks_free=dump.num_free_blocks,
        kv_blocks_cached=dump.num_cached_blocks,
        kv_blocks_used=dump.num_used_blocks,
        kv_blocks_total=dump.num_total_blocks,
        invariant_violations=dump.violations,
        thread_stacks=dump.thread_stacks,
        input_queue_depth=dump.input_queue_depth,
        output_queue_depth=dump.output_queue_depth,
        aborts_queue_depth=dump.aborts_queue_depth,
    )
    for request in dump.requests:
        result.requests.add(
            request_id=request.request_id,
            handle=request.key[1],
            status=request.status,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            computed_tokens=request.num_computed_tokens,
            blocks=request.num_blocks,
            preemptions=request.num_preemptions,
            age_ms=min(max(0, int(request.age_s * 1000)), _MAX_UINT32),
        )
    return result


def _value(enum: Any, prefix: str, member: Any) -> Any:
    return enum.Value(f"{prefix}_{'UNSPECIFIED' if member is None else member.name}")


def _tags(tags: frozenset[op.WakeTag]) -> list[Any]:
    return [_value(control.WakeTag, "WAKE_TAG", tag) for tag in op.WakeTag if tag in tags]


# Result class -> its field of UtilityResult, and how it is encoded.
_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    op.ResetPrefixCacheResult: (
        "reset_prefix_cache",
        lambda result: control.ResetPrefixCacheResult(
            reset=result.is_reset, blocks_in_use=0 if result.is_reset else result.num_used_blocks
        ),
    ),
    op.PauseResult: (
        "pause",
        lambda result: control.PauseResult(aborted_requests=result.num_aborted, held_requests=result.num_held),
    ),
    op.ResumeResult: ("resume", lambda result: control.ResumeResult(resumed=result.is_resumed)),
    op.IsPausedResult: ("is_paused", _is_paused),
    op.SleepResult: ("sleep", lambda result: control.SleepResult(freed_bytes=result.freed_bytes)),
    op.WakeUpResult: ("wake_up", lambda result: control.WakeUpResult(still_asleep=_tags(result.still_asleep))),
    op.IsSleepingResult: ("is_sleeping", _is_sleeping),
    op.StartProfileResult: (
        "start_profile",
        lambda result: control.StartProfileResult(output_dir=result.output_dir),
    ),
    op.StopProfileResult: ("stop_profile", lambda result: control.StopProfileResult(files=result.files)),
    op.StateDump: ("dump_state", _dump_state),
    op.CheckHealthResult: ("check_health", _check_health),
    op.GetSupportedTasksResult: (
        "get_supported_tasks",
        lambda result: control.GetSupportedTasksResult(tasks=result.tasks),
    ),
    op.GetKVCacheMetadataResult: ("get_kv_cache_metadata", _kv_cache_metadata),
    op.ExecuteDummyBatchResult: (
        "execute_dummy_batch",
        lambda result: control.ExecuteDummyBatchResult(duration_us=int(result.duration_s * 1e6)),
    ),
    op.ResetEncoderCacheResult: ("reset_encoder_cache", lambda _: control.ResetEncoderCacheResult()),
    wop.ReloadWeightsResult: (
        "reload_weights",
        lambda result: control.ReloadWeightsResult(version=result.version, loaded_bytes=result.num_bytes),
    ),
    wop.StartWeightUpdateResult: (
        "start_weight_update",
        lambda result: control.StartWeightUpdateResult(update_id=result.update_id),
    ),
    wop.UpdateWeightsResult: (
        "update_weights",
        lambda result: control.UpdateWeightsResult(tensors_received=result.num_tensors),
    ),
    wop.FinishWeightUpdateResult: (
        "finish_weight_update",
        lambda result: control.FinishWeightUpdateResult(version=result.version),
    ),
    wop.GetWeightVersionResult: (
        "get_weight_version",
        lambda result: control.GetWeightVersionResult(version=result.version),
    ),
    op.DrainResult: ("drain", lambda result: pb.DrainResult(requests_in_flight=result.num_requests)),
}
