"""The engine's Connect stream over a real socket: handshake, order, isolation, and what each frame promises."""

from __future__ import annotations

import random
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from fakes.fake_executor import CALLBACK_TOKEN, POISON_TOKEN, SLOW_TOKEN, VOCAB_SIZE, next_token
from running_engine import RunningEngine, engine_request, running_engine
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.v1 import common_pb2


@pytest.fixture(scope="module", params=["--async-scheduling", "--no-async-scheduling"], ids=["async", "sync"])
def engine(request: pytest.FixtureRequest) -> Iterator[RunningEngine]:
    limits = ("--num-blocks", "64", "--max-model-len", "-1", "--max-queued-requests", "200")
    with running_engine(*limits, request.param) as engine:
        yield engine


def expected_tokens(prompt: list[int], num: int) -> list[int]:
    known = list(prompt)
    for _ in range(num):
        known.append(next_token(known))
    return known[len(prompt) :]


def assert_idle(engine: RunningEngine) -> None:
    """No request, no used block, no broken invariant."""
    state = engine.connect("observer").dump_state().dump_state
    assert not state.requests
    assert state.kv_blocks_used == 0
    assert not state.invariant_violations
    assert state.kv_blocks_free + state.kv_blocks_cached + 1 == state.kv_blocks_total


def reason_of(error: grpc.RpcError) -> str:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.reason


def test_ready_states_the_facts(engine: RunningEngine) -> None:
    ready = engine.connect().next().ready
    assert (ready.protocol, ready.model, ready.vocab_size, ready.resumed) == (1, "fake", VOCAB_SIZE, False)
    assert (ready.num_blocks, ready.block_size, ready.kv_cache_tokens) == (64, 16, 63 * 16)
    assert ready.max_model_len == 63 * 16
    assert ready.state == common_pb2.ENGINE_STATE_RUNNING
    info = engine.stub.GetEngineInfo(pb.GetEngineInfoRequest()).ready
    assert info == ready


def test_a_better_priority_and_another_class_are_served_before_those_who_came_first() -> None:
    policy = ("--scheduling-policy", "priority", "--client-class-best-priorities", "free=0")
    with running_engine("--num-blocks", "64", "--max-model-len", "-1", "--max-num-seqs", "1", *policy) as engine:
        stream = engine.connect()
        assert list(stream.next().ready.features) == ["priority", "pooling:last", "model_impl:fake"]
        asked = [(1, "flood"), (1, "flood"), (1, "other"), (0, "free"), (-5, "free"), (-1, "gold")]
        # One frame: all of them are queued before the first step.
        stream.add(
            *(
                engine_request(handle, [5 + handle], max_tokens=1, priority=priority, client_class=client_class)
                for handle, (priority, client_class) in enumerate(asked)
            )
        )
        stream.until_finished(*range(len(asked)))
        scheduled = {
            output.handle: event.monotonic_ns
            for frame in stream.frames
            for output in frame.outputs.outputs
            for event in output.events
            if event.type == pb.EVENT_TYPE_SCHEDULED
        }
        assert sorted(scheduled, key=scheduled.__getitem__) == [5, 3, 4, 0, 2, 1]


def test_tokens_are_those_of_the_model_and_each_request_finishes_once(engine: RunningEngine) -> None:
    stream = engine.connect()
    prompts = {handle: [10 + handle] * (7 * handle) for handle in range(1, 9)}
    stream.add(*(engine_request(handle, prompt, max_tokens=handle) for handle, prompt in prompts.items()))
    stream.until_finished(*prompts)
    for handle, prompt in prompts.items():
        assert stream.tokens[handle] == expected_tokens(prompt, handle)
        assert stream.finishes[handle].reason == pb.ENGINE_FINISH_REASON_LENGTH
    assert_idle(engine)


def test_the_first_news_of_a_request_is_that_it_is_queued(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.add(engine_request(1, [10] * 20))
    output = stream.until(lambda frame: frame.outputs.outputs).outputs.outputs[0]
    assert output.events[0].type == pb.EVENT_TYPE_QUEUED
    stream.until_finished(1)


def test_a_stop_token_ends_with_its_id_and_eos_without(engine: RunningEngine) -> None:
    stream = engine.connect()
    third = expected_tokens([10] * 5, 3)[2]
    stream.add(
        engine_request(1, [10] * 5, 50, stop_token_ids=[third]), engine_request(2, [10] * 5, 50, eos_token_ids=[third])
    )
    stream.until_finished(1, 2)
    assert stream.finishes[1].reason == stream.finishes[2].reason == pb.ENGINE_FINISH_REASON_STOP
    assert stream.finishes[1].stop_token_id == third
    assert not stream.finishes[2].HasField("stop_token_id")
    assert stream.tokens[1] == stream.tokens[2] == expected_tokens([10] * 5, 3)


def test_resumed_tokens_count_as_output_and_are_not_sent_back(engine: RunningEngine) -> None:
    stream = engine.connect()
    tokens = expected_tokens([10] * 5, 8)
    stream.add(engine_request(1, [10] * 5, 8, resume_output_token_ids=token_array.pack(tokens[:5])))
    stream.until_finished(1)
    assert stream.tokens[1] == tokens[5:]


def test_two_frontends_use_the_same_handles(engine: RunningEngine) -> None:
    first, second = engine.connect("first"), engine.connect("second")
    first.add(engine_request(1, [10] * 5))
    second.add(engine_request(1, [11] * 9))
    first.until_finished(1)
    second.until_finished(1)
    assert first.tokens[1] == expected_tokens([10] * 5, 5)
    assert second.tokens[1] == expected_tokens([11] * 9, 5)


def test_random_adds_and_aborts_end_each_handle_once(engine: RunningEngine) -> None:
    stream, rng = engine.connect(), random.Random(1)
    for handle in range(1, 101):
        stream.add(engine_request(handle, [10 + handle] * rng.randint(1, 80), rng.randint(1, 60)))
        if rng.random() < 0.3:
            stream.abort(rng.randint(1, handle))
    stream.abort(12345)
    stream.until_finished(*range(1, 101))
    reasons = {finish.reason for finish in stream.finishes.values()}
    assert reasons <= {pb.ENGINE_FINISH_REASON_LENGTH, pb.ENGINE_FINISH_REASON_ABORTED}
    assert_idle(engine)


def test_a_handle_sent_again_is_ignored(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.add(engine_request(1, [10] * 5, 30), engine_request(1, [10] * 5, 30))
    stream.until_finished(1)
    stream.dump_state()
    assert stream.tokens[1] == expected_tokens([10] * 5, 30)


@pytest.mark.parametrize(
    ("request_fields", "finish_reason", "error_reason", "words"),
    [
        ({"prompt_token_ids": b"abc"}, pb.ENGINE_FINISH_REASON_ERROR, "REQUEST_FAILED", "multiple of 4"),
        (
            {"structured_output": common_pb2.StructuredOutput()},
            pb.ENGINE_FINISH_REASON_ERROR,
            "REQUEST_FAILED",
            "no kind of constraint",
        ),
        ({"prompt_token_ids": b""}, pb.ENGINE_FINISH_REASON_REJECTED, "FIELD_INVALID", "prompt_token_ids"),
        ({"prompt_token_ids": token_array.pack([512])}, pb.ENGINE_FINISH_REASON_REJECTED, "FIELD_INVALID", "512"),
        ({"stop_token_ids": [9999]}, pb.ENGINE_FINISH_REASON_REJECTED, "FIELD_INVALID", "9999"),
        ({"max_tokens": 0}, pb.ENGINE_FINISH_REASON_REJECTED, "FIELD_INVALID", "max_tokens"),
        ({"max_tokens": 1005}, pb.ENGINE_FINISH_REASON_REJECTED, "FIELD_INVALID", "1008"),
        ({"min_tokens": 6}, pb.ENGINE_FINISH_REASON_REJECTED, "FIELD_INVALID", "min_tokens"),
        (
            {"repetition_detection": {"max_pattern_tokens": 2**31, "min_pattern_tokens": 1, "min_repeats": 2}},
            pb.ENGINE_FINISH_REASON_REJECTED,
            "FIELD_INVALID",
            "256",
        ),
        ({"sampling": pb.EngineSamplingParams()}, pb.ENGINE_FINISH_REASON_REJECTED, "FIELD_INVALID", "top_p"),
        (
            {"sampling": pb.EngineSamplingParams(temperature=float("inf"), top_p=1, repetition_penalty=1)},
            pb.ENGINE_FINISH_REASON_REJECTED,
            "FIELD_INVALID",
            "temperature inf",
        ),
        ({"queue_deadline_in_us": 1, "age_us": 5}, pb.ENGINE_FINISH_REASON_ERROR, "QUEUE_TIMEOUT", "queue timeout"),
        ({"deadline_in_us": 1}, pb.ENGINE_FINISH_REASON_ERROR, "DEADLINE", "deadline"),
    ],
)
def test_a_bad_request_fails_alone(
    engine: RunningEngine, request_fields: dict[str, object], finish_reason: int, error_reason: str, words: str
) -> None:
    stream = engine.connect()
    stream.add(engine_request(1, [10] * 5, 40), engine_request(2, [10] * 5, **request_fields), engine_request(3, [11]))
    stream.until_finished(1, 2, 3)
    finish = stream.finishes[2]
    assert (finish.reason, finish.error.reason) == (finish_reason, error_reason)
    assert words in finish.error.message
    assert stream.tokens[1] == expected_tokens([10] * 5, 40)
    assert_idle(engine)


def test_an_absurd_age_harms_nobodys_statistics(engine: RunningEngine) -> None:
    other, stream = engine.connect("other"), engine.connect()
    other.add(engine_request(1, [10] * 5, 200))
    stream.add(*(engine_request(handle, [10] * 5, 50, age_us=10**17) for handle in range(1, 100)))
    stream.until_finished(*range(1, 100))
    other.until_finished(1)


def test_aborts_are_counted_by_reason_whichever_queue_brings_them(engine: RunningEngine) -> None:
    before = engine.metric('requests_aborted_total{.*reason="client_cancelled"}')
    stream = engine.connect()
    stream.add(*(engine_request(handle, [SLOW_TOKEN] * 5, 900) for handle in range(1, 21)))
    stream.until(lambda frame: frame.outputs.handles)
    stream.abort(*range(1, 21))
    stream.until_finished(*range(1, 21))
    assert engine.metric('requests_aborted_total{.*reason="client_cancelled"}') == before + 20


def test_an_abort_reason_of_a_newer_frontend_is_an_abort(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.add(engine_request(1, [SLOW_TOKEN] * 5, 900))
    stream.until(lambda _: stream.tokens.get(1))
    stream.send(abort=pb.AbortRequests(handles=[1], reason=77))  # type: ignore[arg-type]
    stream.until_finished(1)
    assert stream.finishes[1].reason == pb.ENGINE_FINISH_REASON_ABORTED


def test_a_broken_repeat_of_a_live_handle_changes_nothing(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.add(engine_request(1, [SLOW_TOKEN] * 5, 60), engine_request(1, [512]))
    stream.until_finished(1)
    assert stream.finishes[1].reason == pb.ENGINE_FINISH_REASON_LENGTH
    assert len(stream.tokens[1]) == 60
    assert_idle(engine)


def test_streams_that_break_while_their_prompts_are_hashed_leave_nothing_behind(engine: RunningEngine) -> None:
    for round_number in range(10):
        stream = engine.connect(f"broken-{round_number}")
        stream.next()
        stream.add(*(engine_request(handle, [10 + handle] * 900, 100) for handle in range(1, 60)))
        if round_number % 2:
            stream.until(lambda frame: frame.outputs.outputs)
        stream.call.cancel()
    observer = engine.connect("observer")
    while observer.dump_state().dump_state.requests:
        pass
    assert_idle(engine)


def test_a_new_session_hears_the_state_of_the_engine_at_once(engine: RunningEngine) -> None:
    frame = engine.connect().until(lambda frame: frame.outputs.HasField("stats"))
    assert frame.outputs.stats.kv_blocks_total == 63


def test_stats_say_how_many_frontends_there_are(engine: RunningEngine) -> None:
    # The engine hears a little later that the streams of other tests are gone.
    engine.wait_for_metric(r"sessions\{.*\}", 0)
    first = engine.connect("first")
    assert first.until(lambda frame: frame.outputs.HasField("stats")).outputs.stats.frontends == 1
    second = engine.connect("second")
    assert second.until(lambda frame: frame.outputs.HasField("stats")).outputs.stats.frontends == 2
    first.add(engine_request(1, [10] * 20))
    # What was said before the second one came may be read now.
    first.until(lambda frame: frame.outputs.stats.frontends == 2)


def test_ready_states_the_rank() -> None:
    with running_engine("--data-parallel-rank", "2", "--data-parallel-size", "3") as engine:
        ready = engine.connect().next().ready
    assert (ready.data_parallel_rank, ready.data_parallel_size) == (2, 3)


def test_ready_states_over_how_many_workers_the_model_is_shared() -> None:
    with running_engine("--tensor-parallel-size", "2", "--pipeline-parallel-size", "3") as engine:
        ready = engine.connect().next().ready
    assert (ready.tensor_parallel_size, ready.pipeline_parallel_size) == (2, 3)


def test_a_dump_can_show_the_stacks(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.send(utility=pb.UtilityCall(call_id=3, dump_state={"include_stacks": True}))  # type: ignore[arg-type]
    result = stream.until(lambda frame: frame.HasField("utility_result")).utility_result
    assert "run_busy_loop" in result.dump_state.thread_stacks


def test_an_operation_that_the_engine_does_not_know_fails_alone(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.send(utility=pb.UtilityCall(call_id=1))
    result = stream.until(lambda frame: frame.HasField("utility_result")).utility_result
    assert (result.call_id, result.error.reason) == (1, "UNSUPPORTED_FEATURE")
    assert result.error.grpc_code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    assert_idle(engine)


def test_a_full_queue_refuses_with_advice(engine: RunningEngine) -> None:
    stream = engine.connect()
    stream.add(*(engine_request(handle, [10] * 5) for handle in range(1, 301)))
    stream.until_finished(*range(1, 301))
    rejected = [finish for finish in stream.finishes.values() if finish.reason == pb.ENGINE_FINISH_REASON_REJECTED]
    assert len(rejected) == 100
    assert {finish.error.reason for finish in rejected} == {"QUEUE_FULL"}
    assert all(finish.error.retryable and finish.error.retry_after_ms for finish in rejected)


def test_both_kinds_of_ping_are_answered(engine: RunningEngine) -> None:
    stream = engine.connect()
    for through_step_loop in (False, True):
        stream.send(ping=pb.Ping(nonce=7, through_step_loop=through_step_loop, client_monotonic_ns=99))
        pong = stream.until(lambda frame: frame.HasField("pong")).pong
        assert (pong.nonce, pong.through_step_loop, pong.client_monotonic_ns) == (7, through_step_loop, 99)
        assert pong.state == common_pb2.ENGINE_STATE_RUNNING


@pytest.mark.regression(1)
def test_a_stream_that_breaks_leaves_nothing_behind(engine: RunningEngine) -> None:
    stream = engine.connect("broken")
    stream.add(*(engine_request(handle, [10 + handle] * 50, 900) for handle in range(1, 20)))
    stream.until(lambda frame: frame.outputs.outputs)
    stream.call.cancel()
    observer = engine.connect("observer")
    while observer.dump_state().dump_state.requests:
        pass
    assert_idle(engine)


def test_goodbye_delivers_what_runs_and_ends_with_ok(engine: RunningEngine) -> None:
    stream = engine.connect("leaving")
    stream.add(engine_request(1, [10] * 5, 100))
    stream.send(goodbye=pb.Goodbye(reason="test"))
    stream.half_close()
    assert stream.rest() is grpc.StatusCode.OK
    assert stream.tokens[1] == expected_tokens([10] * 5, 100)


def test_goodbye_can_abort_what_runs(engine: RunningEngine) -> None:
    stream = engine.connect("leaving")
    stream.add(*(engine_request(handle, [10] * 5, 900) for handle in range(1, 9)))
    stream.send(goodbye=pb.Goodbye(reason="test", abort_running=True))
    assert stream.rest() is grpc.StatusCode.OK
    assert set(stream.finishes) == set(range(1, 9))
    assert_idle(engine)


def test_a_second_stream_of_a_session_replaces_the_first(engine: RunningEngine) -> None:
    first = engine.connect("same")
    first.next()
    second = engine.connect("same")
    second.add(engine_request(1, [10] * 5))
    second.until_finished(1)
    with pytest.raises(grpc.RpcError) as caught:
        first.until(lambda _: False)
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert reason_of(caught.value) == "SESSION_REPLACED"


@pytest.mark.parametrize(
    ("hello", "code", "reason"),
    [
        ({"protocol_min": 2, "protocol_max": 3}, grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION"),
        ({"expect_model": "other"}, grpc.StatusCode.FAILED_PRECONDITION, "MODEL_MISMATCH"),
        ({"expect_tokenizer_sha256": "00"}, grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_MISMATCH"),
        ({"session_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "PROTOCOL_VIOLATION"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused(
    engine: RunningEngine, hello: dict[str, object], code: grpc.StatusCode, reason: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        engine.connect(**hello).next()  # type: ignore[arg-type]
    assert caught.value.code() is code
    assert reason_of(caught.value) == reason


def test_a_frame_that_is_none_ends_that_session_only(engine: RunningEngine) -> None:
    other, broken = engine.connect("other"), engine.connect("broken")
    other.add(engine_request(1, [10] * 5, 200))
    broken.next()
    broken.send()
    with pytest.raises(grpc.RpcError) as caught:
        broken.until(lambda _: False)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(caught.value) == "PROTOCOL_VIOLATION"
    other.until_finished(1)
    assert other.tokens[1] == expected_tokens([10] * 5, 200)


def test_bytes_that_are_no_frame_end_that_session_only(engine: RunningEngine) -> None:
    other = engine.connect("other")
    other.add(engine_request(1, [10] * 5, 200))
    raw = engine.channel.stream_stream("/stepwire.engine.v1.EngineCoreService/Connect")
    with pytest.raises(grpc.RpcError):
        list(raw(iter([b"\xff\xff\xff\xff"]), timeout=10))
    other.until_finished(1)
    assert other.tokens[1] == expected_tokens([10] * 5, 200)


def test_health_names_the_service(engine: RunningEngine) -> None:
    health = health_pb2_grpc.HealthStub(engine.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", "stepwire.engine.v1.EngineCoreService"):
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == serving
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.regression(25)
@pytest.mark.regression("forward error fails all pending requests")
def test_an_executor_failure_is_the_last_frame_on_every_stream() -> None:
    with running_engine() as engine:
        streams = [engine.connect(f"session-{index}") for index in range(3)]
        for stream in streams:
            stream.next()
        streams[0].add(engine_request(7, [POISON_TOKEN]))
        for stream in streams:
            assert stream.rest() is grpc.StatusCode.OK
            dead = stream.frames[-1].engine_dead
            assert dead.cause == pb.ENGINE_DEATH_CAUSE_STEP_FAILED
            assert (dead.cause_type, dead.message) == ("RuntimeError", "poisoned prompt")
            assert dead.report_id
        assert list(streams[0].frames[-1].engine_dead.lost_handles) == [7]
        assert engine.wait() == 1


@pytest.mark.regression(25)
def test_a_failure_the_executor_reports_by_callback_is_a_death_with_its_cause() -> None:
    with running_engine() as engine:
        stream = engine.connect()
        stream.add(engine_request(1, [CALLBACK_TOKEN], 4000))
        stream.rest()
        dead = stream.frames[-1].engine_dead
        assert dead.cause == pb.ENGINE_DEATH_CAUSE_EXECUTOR_FAILED
        assert (dead.cause_type, dead.message) == ("RuntimeError", "a worker died")
        assert engine.wait() == 1
