"""Protobuf to dataclasses: every field arrives, and what is unknown never loses a request."""

from __future__ import annotations

import pytest

from fakes.fake_logprobs import fake_rows
from frontend.abort_kind import AbortKind
from frontend.engine_client import wire
from frontend.engine_client.engine_facts import EngineLoad, EngineState, strictest
from frontend.engine_outputs import EngineEvent, EngineFinishReason
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.errors import InvalidRequestError, OverloadedError, RequestFailedError, UnavailableError
from stepwire.v1 import common_pb2


def test_fast_path_and_rich_outputs():
    batch = pb.EngineCoreOutputs(
        monotonic_ns=7,
        handles=[1, 2],
        token_ids=[10, 20],
        outputs=[
            pb.RequestOutput(
                handle=3,
                new_token_ids=[30, 31],
                events=[
                    pb.Event(type=pb.EVENT_TYPE_QUEUED, monotonic_ns=5),
                    pb.Event(type=99, monotonic_ns=6),
                ],
                prefill=pb.PrefillStats(prompt_tokens=9, local_cached_tokens=4),
                finish=pb.Finish(reason=pb.ENGINE_FINISH_REASON_STOP, stop_token_id=0, preemptions=2),
            )
        ],
    )
    plain, second, rich = wire.to_outputs(batch)
    assert (plain.handle, plain.new_token_ids, plain.monotonic_ns, plain.finish) == (1, (10,), 7, None)
    assert second.new_token_ids == (20,)
    assert (rich.new_token_ids, rich.events) == ((30, 31), ((EngineEvent.QUEUED, 5),))
    assert rich.cached_prompt_tokens == 4
    assert rich.finish is not None
    assert (rich.finish.reason, rich.finish.stop_token_id, rich.finish.preemptions) == (EngineFinishReason.STOP, 0, 2)


def test_end_of_sequence_has_no_stop_token():
    output = pb.RequestOutput(handle=1, finish=pb.Finish(reason=pb.ENGINE_FINISH_REASON_STOP))
    (converted,) = wire.to_outputs(pb.EngineCoreOutputs(outputs=[output]))
    assert converted.finish is not None
    assert converted.finish.stop_token_id is None
    assert converted.cached_prompt_tokens is None


def test_rows_arrive_as_they_were_packed():
    rows, prompt = fake_rows([30, 31], 5, 2), fake_rows([9], 1, 0)
    packed = [
        pb.Logprobs(width=r.width, token_ids=r.token_ids, logprobs=r.logprobs, ranks=r.ranks) for r in (rows, prompt)
    ]
    output = pb.RequestOutput(handle=3, new_token_ids=[30, 31], logprobs=packed[0], prompt_logprobs=packed[1])
    (converted,) = wire.to_outputs(pb.EngineCoreOutputs(outputs=[output]))
    assert (converted.logprobs, converted.prompt_logprobs) == (rows, prompt)
    (plain,) = wire.to_outputs(pb.EngineCoreOutputs(outputs=[pb.RequestOutput(handle=3)]))
    assert (plain.logprobs, plain.prompt_logprobs) == (None, None)


@pytest.mark.parametrize(("limits", "expected"), [([20, 5], 5), ([-1, 7], 7), ([-1, -1], -1), ([0, 20], 0)], ids=str)
def test_the_strictest_limit_of_log_probabilities_holds(limits: list[int], expected: int):
    every = [wire.to_facts(pb.Ready(max_logprobs=limit)) for limit in limits]
    assert strictest(every[0], every[1:]).max_logprobs == expected


def test_arrays_of_different_length_are_refused():
    with pytest.raises(ValueError):
        wire.to_outputs(pb.EngineCoreOutputs(handles=[1, 2], token_ids=[1]))


def test_unknown_finish_reason_still_ends_the_request():
    output = pb.RequestOutput(handle=1, finish=pb.Finish(reason=77))
    (converted,) = wire.to_outputs(pb.EngineCoreOutputs(outputs=[output]))
    assert converted.finish is not None
    assert converted.finish.reason is EngineFinishReason.ERROR
    assert isinstance(converted.finish.error, RequestFailedError)


@pytest.mark.parametrize(
    ("code", "cls", "retry_after_ms"),
    [(8, OverloadedError, 1000), (14, UnavailableError, 1000), (3, InvalidRequestError, 0), (9, RequestFailedError, 0)],
)
def test_errors_by_whose_fault_they_are(code: int, cls: type[Exception], retry_after_ms: int):
    error = wire.to_error(common_pb2.EngineError(reason="X", message="m", grpc_code=code))
    assert type(error) is cls
    assert (error.reason, error.message, error.retryable) == ("X", "m", False)
    assert error.retry_after_ms == retry_after_ms


def test_advice_of_the_engine_counts():
    error = wire.to_error(common_pb2.EngineError(reason="QUEUE_FULL", grpc_code=8, retry_after_ms=50, retryable=True))
    assert (error.retry_after_ms, error.retryable) == (50, True)


def test_death_with_known_and_unknown_cause():
    dead = pb.EngineDead(
        cause=pb.ENGINE_DEATH_CAUSE_OUT_OF_MEMORY, cause_type="E", message="m", boot_id="b", last_step=3, report_id="r"
    )
    error = wire.to_death(dead)
    assert (error.kind, error.cause, error.cause_type, error.boot_id) == ("reported", "OUT_OF_MEMORY", "E", "b")
    assert (error.last_step, error.report_id) == (3, "r")
    assert error.retry_after_ms > 0
    assert wire.to_death(pb.EngineDead(cause=88)).cause == "88"


def test_states_and_abort_reasons_cover_the_wire():
    for state in EngineState:
        assert common_pb2.EngineState.Name(state.value) == f"ENGINE_STATE_{state.name}"
        assert wire.to_state(state.value) is state
    assert wire.to_state(1234) is EngineState.UNSPECIFIED
    reasons = {wire.to_abort_reason(kind) for kind in AbortKind}
    assert reasons == set(pb.AbortReason.values()) - {pb.ABORT_REASON_UNSPECIFIED}


def test_load_counts_this_frontend_also_when_the_engine_does_not_count():
    assert wire.to_load(pb.SchedulerStats(running=1, waiting=2, frontends=3)) == EngineLoad(1, 2, 3)
    assert wire.to_load(pb.SchedulerStats(running=1, waiting=2)) == EngineLoad(1, 2, 1)
    stats = pb.SchedulerStats(waiting_tokens=500, kv_blocks_used=5, kv_blocks_total=8)
    assert wire.to_load(stats) == EngineLoad(waiting_tokens=500, kv_blocks_used=5, kv_blocks_total=8)
