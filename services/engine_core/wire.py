"""Engine dataclasses to protobuf messages. Requests are decoded by `request_wire`, utility calls by `utility_wire`.

Runs in output threads and never touches the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.messages import EngineCoreDead, OutputMessage, Pong, ShutdownNotice, UtilityResult
from engine_core.resolved_config import ResolvedConfig
from engine_core.scheduler.output import EngineCoreOutput, EngineCoreOutputs, Finish, FinishReason, SchedulerStats
from engine_core.scheduler.request import EventType
from engine_core.scheduler.request_error import RequestError
from engine_core.step_progress import StepProgress
from engine_core.utility_wire import encode_result
from stepwire import __version__
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.grpc_errors import status_code
from stepwire.packed_logprobs import PackedLogprobs
from stepwire.v1 import common_pb2

PROTOCOL_VERSION = 1
# Kinds of frames, from here and to here.
SENT_KINDS = tuple(field.name for field in pb.ConnectResponse.DESCRIPTOR.oneofs_by_name["message"].fields)
RECEIVED_KINDS = tuple(field.name for field in pb.ConnectRequest.DESCRIPTOR.oneofs_by_name["message"].fields)

_NS = 1_000_000_000
_MAX_UINT32 = 2**32 - 1
_STATES: dict[EngineState, common_pb2.EngineState.ValueType] = {
    state: common_pb2.EngineState.Value(f"ENGINE_STATE_{state.name}") for state in EngineState
}
_FINISH_REASONS: dict[FinishReason, pb.EngineFinishReason.ValueType] = {
    reason: pb.EngineFinishReason.Value(f"ENGINE_FINISH_REASON_{reason.name}") for reason in FinishReason
}
_EVENTS: dict[EventType, pb.EventType.ValueType] = {
    event: pb.EventType.Value(f"EVENT_TYPE_{event.name}") for event in EventType
}


def encode_error(error: RequestError) -> common_pb2.EngineError:
    return common_pb2.EngineError(
        reason=error.reason,
        message=sendable(error.message),
        grpc_code=status_code(error.reason).value[0],
        retryable=error.retryable,
        retry_after_ms=error.retry_after_ms,
        cause_type=sendable(error.cause_type),
    )


def sendable(text: str) -> str:
    """As a proto field takes it: what quotes a request may hold half a character, and must not end a stream."""
    return text.encode(errors="backslashreplace").decode()


class FrameEncoder:
    """Output messages to frames. Shared by all sessions; holds no state of any."""

    def __init__(
        self,
        engine_id: str,
        boot_id: str,
        lifecycle: EngineLifecycle,
        progress: StepProgress,
        clock: Callable[[], float],
        *,
        ping_interval_ms: int,
        ping_timeout_ms: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        tensor_parallel_size: int,
        pipeline_parallel_size: int,
        is_tracing: bool,
        num_frontends: Callable[[], int],
    ) -> None:
        self._engine_id = engine_id
        self._boot_id = boot_id
        self._lifecycle = lifecycle
        self._progress = progress
        self._clock = clock
        self._ping_interval_ms = ping_interval_ms
        self._ping_timeout_ms = ping_timeout_ms
        self._data_parallel_rank = data_parallel_rank
        self._data_parallel_size = data_parallel_size
        self._tensor_parallel_size = tensor_parallel_size
        self._pipeline_parallel_size = pipeline_parallel_size
        self._is_tracing = is_tracing
        self._num_frontends = num_frontends

    def ready(self, config: ResolvedConfig | None) -> pb.Ready:
        """The facts of the handshake; before the model is loaded only those that are known."""
        ready = pb.Ready(
            protocol=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            boot_id=self._boot_id,
            data_parallel_rank=self._data_parallel_rank,
            data_parallel_size=self._data_parallel_size,
            tensor_parallel_size=self._tensor_parallel_size,
            pipeline_parallel_size=self._pipeline_parallel_size,
            ping_interval_ms=self._ping_interval_ms,
            ping_timeout_ms=self._ping_timeout_ms,
            state=_STATES[self._lifecycle.state],
            version=__version__,
        )
        if config is not None:
            _fill_config(ready, config)
            if self._is_tracing:
                ready.features.append("tracing")
        return ready

    def encode(
        self, message: OutputMessage, batch_seq: int, live_handles: Callable[[], set[int]]
    ) -> pb.ConnectResponse:
        """One frame. `live_handles` gives the session's requests without a finish."""
        match message:
            case EngineCoreOutputs():
                return pb.ConnectResponse(outputs=self._outputs(message, batch_seq))
            case Pong():
                return pb.ConnectResponse(pong=self._pong(message))
            case ShutdownNotice():
                notice = pb.ShutdownNotice(
                    drain_remaining_ms=_to_ms(message.drain_remaining_s),
                    reason=message.reason,
                    requests_in_flight=len(live_handles()),
                )
                return pb.ConnectResponse(shutdown=notice)
            case UtilityResult():
                result = encode_result(message, encode_error, _STATES[self._lifecycle.state], self._boot_id)
                return pb.ConnectResponse(utility_result=result)
            case EngineCoreDead():
                return pb.ConnectResponse(engine_dead=self._dead(message, live_handles()))

    def _outputs(self, batch: EngineCoreOutputs, batch_seq: int) -> pb.EngineCoreOutputs:
        # Parallel arrays for plain tokens: about ten times cheaper to build than one message for each request.
        plain = [output for output in batch.outputs if output.is_plain_token]
        frame = pb.EngineCoreOutputs(
            batch_seq=batch_seq,
            step=batch.step,
            monotonic_ns=int(batch.time * _NS),
            handles=[output.key[1] for output in plain],
            token_ids=[output.new_token_ids[0] for output in plain],
        )
        if len(plain) < len(batch.outputs):
            frame.outputs.extend(_encode_output(output) for output in batch.outputs if not output.is_plain_token)
        if batch.stats is not None:
            frame.stats.CopyFrom(self._stats(batch.stats))
        return frame

    def _stats(self, stats: SchedulerStats) -> pb.SchedulerStats:
        oldest = stats.oldest_waiting_time
        return pb.SchedulerStats(
            running=stats.num_running,
            waiting=stats.num_waiting,
            waiting_deferred=stats.num_waiting_deferred,
            waiting_tokens=stats.num_waiting_tokens,
            kv_blocks_used=stats.num_used_blocks,
            kv_blocks_cached=stats.num_cached_blocks,
            kv_blocks_total=stats.num_total_blocks,
            prefix_query_tokens=stats.prefix_query_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            preempted_query_tokens=stats.preempted_query_tokens,
            preempted_hit_tokens=stats.preempted_hit_tokens,
            preemptions=stats.num_preemptions,
            prompt_tokens=stats.num_prompt_tokens,
            generation_tokens=stats.num_generation_tokens,
            steps=self._progress.num_steps,
            last_step_us=min(int(self._progress.last_step_s * 1e6), _MAX_UINT32),
            last_step_tokens=self._progress.last_step_tokens,
            oldest_waiting_ms=0 if oldest is None else _to_ms(self._clock() - oldest),
            state=_STATES[self._lifecycle.state],
            frontends=self._num_frontends(),
            weight_version=stats.weight_version,
        )

    def _pong(self, pong: Pong) -> pb.Pong:
        return pb.Pong(
            nonce=pong.nonce,
            through_step_loop=pong.through_step_loop,
            client_monotonic_ns=pong.client_monotonic_ns,
            engine_monotonic_ns=int(self._clock() * _NS),
            step=self._progress.num_steps,
            step_age_ms=_to_ms(self._progress.age_s()),
            state=_STATES[self._lifecycle.state],
        )

    def _dead(self, dead: EngineCoreDead, live_handles: set[int]) -> pb.EngineDead:
        return pb.EngineDead(
            cause=pb.EngineDeathCause.Value(f"ENGINE_DEATH_CAUSE_{dead.cause.name}"),
            cause_type=sendable(dead.cause_type),
            message=sendable(dead.message),
            boot_id=self._boot_id,
            last_step=dead.last_step,
            lost_handles=sorted(live_handles),
            report_id=dead.report_id,
        )


def _to_ms(seconds: float) -> int:
    """Milliseconds for a uint32 field; a value out of its range must not end a stream."""
    return min(max(0, int(seconds * 1000)), _MAX_UINT32)


def _fill_config(ready: pb.Ready, config: ResolvedConfig) -> None:
    ready.model = config.served_model.name
    ready.revision = config.served_model.revision
    ready.tokenizer_sha256 = config.served_model.tokenizer_sha256
    ready.max_model_len = config.max_model_len
    ready.vocab_size = config.model_info.vocab_size
    ready.architecture = config.model_info.architecture
    ready.dtype = config.model_info.dtype
    ready.kv_cache_dtype = config.model_info.dtype
    ready.block_size = config.block_size
    ready.num_blocks = config.num_blocks
    ready.kv_cache_tokens = config.kv_cache_tokens
    ready.max_num_seqs = config.max_num_seqs
    ready.max_num_batched_tokens = config.max_num_batched_tokens
    ready.max_queued_requests = config.max_queued_requests
    ready.max_queued_tokens = config.max_queued_tokens
    ready.max_logprobs = config.max_logprobs
    ready.features.extend(config.features)
    ready.structured_output_kinds.extend(config.structured_output_kinds)
    ready.weight_version = config.served_model.weight_version
    ready.embedding_dimensions = config.embedding_dimensions
    ready.kv_cache_max_concurrency = config.kv_cache_tokens / config.max_model_len


def _encode_output(output: EngineCoreOutput) -> pb.RequestOutput:
    message = pb.RequestOutput(handle=output.key[1], new_token_ids=output.new_token_ids, pooled=output.pooled or b"")
    for event in output.events:
        message.events.add(type=_EVENTS[event.type], monotonic_ns=int(event.time * _NS))
    if output.prefill is not None:
        message.prefill.prompt_tokens = output.prefill.num_prompt_tokens
        message.prefill.local_cached_tokens = output.prefill.num_cached_tokens
        message.prefill.computed_tokens = output.prefill.num_prompt_tokens - output.prefill.num_cached_tokens
    if output.logprobs is not None:
        message.logprobs.CopyFrom(_encode_logprobs(output.logprobs))
    if output.prompt_logprobs is not None:
        message.prompt_logprobs.CopyFrom(_encode_logprobs(output.prompt_logprobs))
    if output.finish is not None:
        message.finish.CopyFrom(_encode_finish(output.finish))
    return message


def _encode_logprobs(rows: PackedLogprobs) -> pb.Logprobs:
    return pb.Logprobs(width=rows.width, token_ids=rows.token_ids, logprobs=rows.logprobs, ranks=rows.ranks)


def _encode_finish(finish: Finish) -> pb.Finish:
    return pb.Finish(
        reason=_FINISH_REASONS[finish.reason],
        stop_token_id=finish.stop_token_id,
        error=None if finish.error is None else encode_error(finish.error),
        preemptions=finish.num_preemptions,
    )
