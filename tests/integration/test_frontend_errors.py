"""Every row of the error table that exists, through a real socket: code, reason, details; other streams go on."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from grpc_reflection.v1alpha import reflection

from fakes.fake_engine import WAIT_S, FakeEngine
from fakes.late_errors import fail_after
from running_frontend import RunningFrontend, failure_of, request, running_frontend
from stepwire.engine.v1 import engine_core_pb2
from stepwire.v1 import common_pb2, generation_service_pb2, model_service_pb2, tokenization_service_pb2

Code = grpc.StatusCode


def changed(**fields: object) -> generation_service_pb2.GenerateRequest:
    message = request()
    message.MergeFrom(generation_service_pb2.GenerateRequest(**fields))
    return message


BAD_REQUESTS = {
    "top_p": (changed(sampling=common_pb2.SamplingParams(top_p=7)), "FIELD_INVALID", ["sampling.top_p"]),
    "empty prompt": (changed(text=""), "FIELD_INVALID", ["prompt"]),
    "token id": (changed(token_ids=common_pb2.TokenIds(ids=[1, 400])), "FIELD_INVALID", ["token_ids.ids[1]"]),
    "several": (
        changed(sampling=common_pb2.SamplingParams(top_k=-2, min_p=2)),
        "FIELD_INVALID",
        ["sampling.top_k", "sampling.min_p"],
    ),
    "long prompt": (
        changed(token_ids=common_pb2.TokenIds(ids=[5] * 100_000)),
        "CONTEXT_LENGTH_EXCEEDED",
        ["token_ids"],
    ),
    "request id": (changed(request_id="é"), "FIELD_INVALID", ["request_id"]),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_input_is_invalid_argument_with_its_fields(frontend: RunningFrontend, engine: FakeEngine, name: str):
    message, reason, fields = BAD_REQUESTS[name]
    if name == "empty prompt":
        message.ClearField("text")
    failure = await failure_of(frontend.generation.Generate(message))

    assert (failure.code, failure.reason, failure.info.domain) == (Code.INVALID_ARGUMENT, reason, "stepwire")
    assert failure.fields == fields
    assert failure.info.metadata["retryable"] == "false"
    assert engine.adds == []


async def test_unknown_model_is_not_found(frontend: RunningFrontend):
    for call in (
        frontend.generation.Generate(request(model="other")),
        frontend.models.GetModel(model_service_pb2.GetModelRequest(model="other")),
        frontend.tokenization.Tokenize(tokenization_service_pb2.TokenizeRequest(model="other", texts=["x"])),
        frontend.tokenization.Detokenize(tokenization_service_pb2.DetokenizeRequest(model="other")),
    ):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
        assert "other" in failure.message


async def test_unsupported_option_is_unimplemented_and_named(frontend: RunningFrontend):
    failure = await failure_of(frontend.generation.Generate(request(priority=1)))
    assert (failure.code, failure.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE")
    assert "priority" in failure.message


async def test_priority_and_class_travel_to_an_engine_that_serves_by_priority(engine: FakeEngine, tmp_path):
    engine.ready.features.append("priority")
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as running:
        await running.wait_for_health(1)
        await running.generation.Generate(request(priority=-2), metadata=(("x-gateway-inference-fairness-id", "gold"),))
        await running.generation.Generate(request())
        too_long = running.generation.Generate(request(), metadata=(("x-gateway-inference-fairness-id", "x" * 200),))
        failure = await failure_of(too_long)
    assert [(add.priority, add.client_class) for add in engine.adds] == [(-2, "gold"), (0, "")]
    assert (failure.code, failure.fields) == (Code.INVALID_ARGUMENT, ["x-gateway-inference-fairness-id"])


async def test_the_objective_of_a_gateway_is_the_class_of_a_request_without_a_fairness_id(
    frontend: RunningFrontend, engine: FakeEngine
):
    objective = ("x-gateway-inference-objective", "batch")
    fairness = ("x-gateway-inference-fairness-id", "gold")
    for metadata in ((objective,), (objective, fairness)):
        await frontend.generation.Generate(request(), metadata=metadata)
    assert [add.client_class for add in engine.adds] == ["batch", "gold"]
    failure = await failure_of(
        frontend.generation.Generate(request(), metadata=(("x-gateway-inference-objective", "x" * 200),))
    )
    assert (failure.code, failure.fields) == (Code.INVALID_ARGUMENT, ["x-gateway-inference-objective"])


async def test_request_id_in_flight_already_exists(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    first = frontend.stream(request(request_id="same"))
    await first.next()
    failure = await failure_of(frontend.generation.Generate(request(request_id="same")))

    assert (failure.code, failure.reason) == (Code.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    assert failure.info.metadata["tokens_emitted"] == "0"
    # Another caller has a namespace of its own, and the id is free again once its request has ended.
    engine.may_step.set()
    await frontend.generation.Generate(request(request_id="same"), metadata=(("authorization", "Bearer other"),))
    assert (await first.rest())[-1].HasField("finished")
    await frontend.generation.Generate(request(request_id="same"))


async def test_a_caller_that_lost_its_stream_is_told_how_far_it_came(frontend: RunningFrontend, engine: FakeEngine):
    def halt(_add: engine_core_pb2.EngineCoreRequest, index: int) -> None:
        if index == 3:
            engine.may_step.clear()

    engine.fail = halt
    stream = frontend.stream(request("a b c d", request_id="same", max_tokens=8, output={"token_ids": True}))
    num_tokens = 0
    while num_tokens < 4:
        num_tokens += len((await stream.next()).delta.token_ids)
    # A token counts when it is written, which may be after it was read.
    told = -1
    async with asyncio.timeout(WAIT_S):
        while told != num_tokens:
            failure = await failure_of(frontend.generation.Generate(request(request_id="same")))
            assert failure.reason == "DUPLICATE_REQUEST"
            told = int(failure.info.metadata["tokens_emitted"])
            assert told <= num_tokens
    engine.may_step.set()
    assert (await stream.rest())[-1].HasField("finished")


async def test_too_many_requests_are_refused_at_the_door(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, max_concurrent_requests=2) as running:
        await running.wait_for_health(1)
        engine.may_step.clear()
        first = running.stream(request(sampling=common_pb2.SamplingParams(n=2, temperature=1)))
        await first.next()
        failure = await failure_of(running.generation.Generate(request()))
        assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert failure.retry_info.retry_delay.ToMilliseconds() > 0
        assert failure.info.metadata["retryable"] == "true"
        assert running.metric("requests_rejected_total", reason="QUEUE_FULL", client_class="other") == 1
        engine.may_step.set()
        assert (await first.rest())[-1].HasField("finished")
        await running.generation.Generate(request())


ENGINE_REFUSALS = {
    "QUEUE_FULL": (8, Code.RESOURCE_EXHAUSTED),
    "KV_CAPACITY": (9, Code.FAILED_PRECONDITION),
    "DRAINING": (14, Code.UNAVAILABLE),
}


@pytest.mark.parametrize("reason", ENGINE_REFUSALS)
async def test_refusal_of_the_engine_reaches_the_caller_before_any_header(
    frontend: RunningFrontend, engine: FakeEngine, reason: str
):
    number, code = ENGINE_REFUSALS[reason]
    engine.reject = lambda add: common_pb2.EngineError(reason=reason, message="no", grpc_code=number)
    call = frontend.stream(request(request_id="r1"))
    failure = await call.failure()

    assert (failure.code, failure.reason, failure.message) == (code, reason, "no")
    assert failure.info.metadata["request_id"] == "r1"
    assert failure.info.metadata["tokens_emitted"] == "0"
    assert "x-engine-id" not in dict(await call.call.initial_metadata())
    assert failure.retry_info.retry_delay.ToMilliseconds() == (0 if reason == "KV_CAPACITY" else 1000)
    model = {"model_name": "fake-model", "engine_id": "fake-0"}
    assert frontend.metric("requests_finished_total", finished_reason="rejected", **model) == 1


async def test_request_that_fails_alone_is_internal_and_others_go_on(frontend: RunningFrontend, engine: FakeEngine):
    error = common_pb2.EngineError(reason="REQUEST_FAILED", message="odd", grpc_code=13, retryable=True)
    engine.may_step.clear()
    other = frontend.stream(request(max_tokens=50))
    await other.next()
    bad = frontend.stream(request(max_tokens=50, request_id="bad"))
    await bad.next()
    engine.may_step.set()
    await fail_after(engine, frontend, 2, error, "bad")

    failure = await bad.failure()
    assert (failure.code, failure.reason) == (Code.INTERNAL, "REQUEST_FAILED")
    assert failure.info.metadata["tokens_emitted"] == "2"
    # Part of it was delivered: it is resumed, not retried.
    assert failure.info.metadata["retryable"] == "false"
    assert (await other.rest())[-1].HasField("finished")


async def test_siblings_of_a_failed_choice_are_aborted(frontend: RunningFrontend, engine: FakeEngine):
    error = common_pb2.EngineError(reason="REQUEST_FAILED", message="odd", grpc_code=13)
    engine.fail = lambda add, index: error if add.sampling.seed == 8 else None
    failure = await failure_of(
        frontend.generation.Generate(
            request(max_tokens=1_000, sampling=common_pb2.SamplingParams(n=3, temperature=1, seed=7))
        )
    )
    assert failure.reason == "REQUEST_FAILED"
    await engine.wait_until(lambda: engine.num_live == 0)
    assert frontend.maps == (0, 0)


@pytest.mark.regression("output error fails one request")
async def test_output_processing_failure_is_internal_for_that_request_only(frontend: RunningFrontend, monkeypatch):
    processor = frontend.process.frontend.model.output_processor
    original = processor._process

    def poisoned(state, choice, output, stopped):
        if state.log_fields["request_id"] == "bad":
            raise RuntimeError("poison")
        original(state, choice, output, stopped)

    monkeypatch.setattr(processor, "_process", poisoned)
    failure, answer = await asyncio.gather(
        failure_of(frontend.generation.Generate(request(request_id="bad"))),
        frontend.generation.Generate(request(request_id="good")),
    )
    assert (failure.code, failure.reason) == (Code.INTERNAL, "OUTPUT_PROCESSING")
    assert answer.completions[0].text
    assert frontend.metric("output_processing_errors_total", stage="detokenize") == 1


async def test_unexpected_exception_is_internal_without_its_text(frontend: RunningFrontend, monkeypatch):
    model = frontend.process.frontend.model

    async def broken(*args, **kwargs):
        raise RuntimeError("secret")

    monkeypatch.setattr(model.input_processor, "process", broken)
    failure = await failure_of(frontend.generation.Generate(request(request_id="r1")))
    monkeypatch.undo()

    assert (failure.code, failure.reason) == (Code.INTERNAL, "INTERNAL")
    assert "secret" not in failure.message
    assert failure.info.metadata["request_id"] == "r1"
    await frontend.generation.Generate(request())


async def test_no_engine_yet_is_unavailable_starting(tokenizer_dir, tmp_path):
    engine = FakeEngine(tokenizer_dir)
    engine.is_loaded.clear()
    async with engine.running(), running_frontend(engine.endpoint, cache_dir=tmp_path / "cache") as running:
        for call in (
            running.generation.Generate(request()),
            running.models.ListModels(model_service_pb2.ListModelsRequest()),
            running.tokenization.Tokenize(tokenization_service_pb2.TokenizeRequest(texts=["x"])),
        ):
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "ENGINE_STARTING")
            assert failure.retry_info.retry_delay.ToMilliseconds() > 0
            assert failure.info.metadata["retryable"] == "true"
        engine.is_loaded.set()
        await running.wait_for_health(1)
        await running.generation.Generate(request())


async def test_unknown_method_is_unimplemented(frontend: RunningFrontend):
    call = frontend.channel.unary_unary("/stepwire.v1.GenerationService/Nothing")
    failure = await failure_of(call(b""))
    assert failure.code is Code.UNIMPLEMENTED


async def test_choices_that_are_too_large_together_harm_nobody(tokenizer_dir, tmp_path):
    engine = FakeEngine(tokenizer_dir, vocab_size=100_000)
    token_ids = range(20_000, 69_000)
    async with engine.running(), running_frontend(engine.endpoint, cache_dir=tmp_path / "cache") as running:
        await running.wait_for_health(1)
        engine.may_step.clear()
        other = running.stream(request())
        await other.next()
        sampling = common_pb2.SamplingParams(temperature=1, n=1000, allowed_token_ids=token_ids)
        failure = await failure_of(running.generation.Generate(request(sampling=sampling)))
        assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, "FIELD_INVALID")
        assert failure.fields == ["sampling.n"]
        assert "sampling.allowed_token_ids" in failure.message
        assert len(engine.adds) == 1

        # What is still allowed travels in several frames.
        engine.may_step.set()
        sampling.n, engine.add_frames = 60, 0
        answer = await running.generation.Generate(request(sampling=sampling, max_tokens=1))
        assert len(answer.completions) == 60
        assert engine.add_frames > 1
        assert (await other.rest())[-1].HasField("finished")


async def test_garbage_on_a_request_stream_is_invalid_argument(frontend: RunningFrontend, caplog):
    method = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
    call = frontend.channel.stream_stream(method)(iter([b"\xff\xff\xff"]))
    failure = await failure_of(call.read())
    assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, "FIELD_INVALID")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    await frontend.wait_for_metric(1, "rpcs_handled_total", grpc_method=method, grpc_code="INVALID_ARGUMENT")


async def test_garbage_on_the_port_harms_nobody(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    call = frontend.stream(request())
    await call.next()
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nnonsense" * 9):
        _, writer = await asyncio.open_connection("127.0.0.1", frontend.process.port)
        writer.write(garbage)
        await writer.drain()
        writer.close()
    bad_bytes = frontend.channel.unary_unary("/stepwire.v1.GenerationService/Generate")
    failure = await failure_of(bad_bytes(b"\xff\xff\xff"))
    assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, "FIELD_INVALID")

    engine.may_step.set()
    assert (await call.rest())[-1].HasField("finished")
