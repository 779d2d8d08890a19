"""Generate and GenerateStream through a real frontend and a fake engine: what a caller sees when all is well."""

from __future__ import annotations

import asyncio

import pytest

from fakes.fake_engine import FakeEngine
from running_frontend import SERVING, RunningFrontend, request, running_frontend
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2
from stepwire.v1 import common_pb2, generation_service_pb2


async def read(call) -> list[generation_service_pb2.GenerateStreamResponse]:
    return [message async for message in call]


def kinds(messages) -> list[str]:
    return [message.WhichOneof("event") for message in messages]


async def test_a_stream_is_accepted_then_deltas_then_finished(frontend: RunningFrontend):
    call = frontend.generation.GenerateStream(request("hello world", max_tokens=3, request_id="r1"))
    messages = await read(call)

    assert kinds(messages)[0] == "accepted"
    assert kinds(messages)[-1] == "finished"
    assert set(kinds(messages)[1:-1]) == {"delta"}
    assert [message.index for message in messages] == list(range(len(messages)))
    accepted, finished = messages[0].accepted, messages[-1].finished
    assert (accepted.request_id, accepted.model, accepted.engine_id) == ("r1", "fake-model", "fake-0")
    assert accepted.prompt_tokens == 2
    assert accepted.system_fingerprint.startswith("sw-")
    # The fake echoes: hello, world, hello.
    assert "".join(message.delta.text for message in messages) == "hello worldhello"
    assert finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 3)
    assert not finished.HasField("timings")


async def test_headers_name_request_and_engine(frontend: RunningFrontend):
    call = frontend.generation.GenerateStream(request(request_id="r1"))
    await read(call)
    headers = dict(await call.initial_metadata())
    assert (headers["x-request-id"], headers["x-engine-id"]) == ("r1", "fake-0")


async def test_the_trace_of_the_caller_reaches_the_engine_with_its_vendors_state(
    frontend: RunningFrontend, engine: FakeEngine
):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    metadata = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"), ("tracestate", "vendor=a:1,other=b"))
    await frontend.generation.Generate(request(), metadata=metadata)
    (add,) = engine.adds
    assert add.traceparent.split("-")[1] == trace_id
    assert add.tracestate == "vendor=a:1,other=b"


async def test_request_id_comes_from_metadata_or_is_made_up(frontend: RunningFrontend):
    named = await frontend.generation.Generate(request(), metadata=(("x-request-id", "from-header"),))
    unnamed = await frontend.generation.Generate(request())
    assert named.request_id == "from-header"
    assert unnamed.request_id


async def test_unary_gives_the_whole_answer(frontend: RunningFrontend):
    answer = await frontend.generation.Generate(
        request("hello world", max_tokens=3, output=common_pb2.OutputOptions(token_ids=True, timings=True))
    )
    (completion,) = answer.completions
    assert completion.text == "hello worldhello"
    assert len(completion.token_ids) == 3
    assert completion.reason == common_pb2.FINISH_REASON_LENGTH
    assert answer.usage.completion_tokens == 3
    assert answer.timings.ttft_ns > 0
    assert answer.timings.engine_id == "fake-0"
    assert answer.model == "fake-model"


async def test_n_choices_end_once_each_and_only_the_last_has_usage(frontend: RunningFrontend, engine: FakeEngine):
    call = frontend.generation.GenerateStream(
        request(max_tokens=3, sampling=common_pb2.SamplingParams(n=2, temperature=1, seed=40))
    )
    messages = await read(call)

    finished = [message.finished for message in messages if message.HasField("finished")]
    assert sorted(one.choice for one in finished) == [0, 1]
    assert [one.HasField("usage") for one in finished] == [False, True]
    assert finished[-1].usage.completion_tokens == 6
    assert finished[-1].usage.prompt_tokens == 2
    assert messages[0].accepted.seed == 40
    assert [add.sampling.seed for add in engine.adds] == [40, 41]
    # Adds of one turn of the loop share a frame.
    assert engine.add_frames == 1


async def test_unary_keeps_choices_in_order(frontend: RunningFrontend):
    answer = await frontend.generation.Generate(request(sampling=common_pb2.SamplingParams(n=3, temperature=1)))
    assert [completion.choice for completion in answer.completions] == [0, 1, 2]
    assert {completion.text for completion in answer.completions} == {"hello worldhello world"}


async def test_stop_string_is_answered_and_aborted_in_the_engine(frontend: RunningFrontend, engine: FakeEngine):
    message = request("hello world", max_tokens=1000)
    message.stop.stop.append("world")
    answer = await frontend.generation.Generate(message)

    assert answer.completions[0].text == "hello "
    assert answer.completions[0].stop_match.stop_string == "world"
    await engine.wait_until(lambda: bool(engine.aborts))
    assert list(engine.aborts[0].handles) == [engine.adds[0].handle]
    assert engine.aborts[0].reason == 3  # ABORT_REASON_STOP_STRING
    assert frontend.metric("requests_aborted_total", reason="stop_string") == 1


async def test_token_prompts_stop_ids_and_end_of_sequence(frontend: RunningFrontend):
    prompt = common_pb2.TokenIds(ids=[50, 51, 0])
    message = generation_service_pb2.GenerateRequest(token_ids=prompt)
    message.sampling.temperature = 0
    ended = await frontend.generation.Generate(message)
    message.stop.stop_token_ids.append(51)
    stopped = await frontend.generation.Generate(message)

    assert ended.completions[0].stop_match.eos_token_id == 0
    assert ended.completions[0].stop_match.WhichOneof("match") == "eos_token_id"
    assert stopped.completions[0].stop_match.stop_token_id == 51
    assert stopped.completions[0].reason == common_pb2.FINISH_REASON_STOP


async def test_the_engine_gets_everything_resolved(frontend: RunningFrontend, engine: FakeEngine):
    await frontend.generation.Generate(request("hello world", max_tokens=2, request_id="r9"), timeout=30)
    (add,) = engine.adds
    assert add.request_id == "r9"
    assert len(token_array.unpack(add.prompt_token_ids)) == 2
    assert add.max_tokens == 2
    assert list(add.eos_token_ids) == [0]
    # gRPC rounds the timeout up to three digits on its way.
    assert 10_000_000 < add.deadline_in_us <= 30_100_000
    assert add.queue_deadline_in_us == 0
    assert engine.hellos[0].expect_tokenizer_sha256 == engine.ready.tokenizer_sha256


async def test_many_streams_at_once_leave_nothing_behind(frontend: RunningFrontend, engine: FakeEngine):
    texts = [f"prompt number {number}" for number in range(40)]
    answers = await asyncio.gather(*(frontend.generation.Generate(request(text, max_tokens=20)) for text in texts))

    for text, answer in zip(texts, answers, strict=True):
        assert (text * 20).startswith(answer.completions[0].text)
    await frontend.wait_idle()
    assert frontend.maps == (0, 0)
    assert frontend.process.frontend.pool.num_routes == 0
    assert engine.num_live == 0
    model = {"model_name": "fake-model", "engine_id": "fake-0"}
    assert frontend.metric("requests_finished_total", finished_reason="length", **model) == 40
    assert frontend.metric("time_to_first_token_seconds_count", **model) == 40
    assert frontend.metric("request_generation_tokens_sum", **model) == 800
    assert frontend.metric("requests_in_flight", client_class="other") == 0


async def test_tokenizer_of_the_operator_is_used_and_stated(engine: FakeEngine, tokenizer_dir, tmp_path):
    async with running_frontend(
        engine.endpoint, cache_dir=tmp_path / "unused", tokenizer=str(tokenizer_dir)
    ) as running:
        await running.wait_for_health(SERVING)
        answer = await running.generation.Generate(request())
    assert answer.completions[0].text == "hello worldhello world"
    assert engine.hellos[0].expect_tokenizer_sha256 == engine.ready.tokenizer_sha256
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("echo", [False, True])
async def test_echo_puts_the_prompt_first(frontend: RunningFrontend, echo: bool):
    answer = await frontend.generation.Generate(
        request("hello", max_tokens=1, output=common_pb2.OutputOptions(echo_prompt=echo))
    )
    assert answer.completions[0].text == ("hellohello" if echo else "hello")


async def test_output_is_held_back_for_whole_chunks_all_but_the_first_and_the_last(
    frontend: RunningFrontend, engine: FakeEngine
):
    output = common_pb2.OutputOptions(token_ids=True, min_chunk_tokens=4)
    messages = await read(frontend.generation.GenerateStream(request("a b c", max_tokens=30, output=output)))
    sizes = [len(message.delta.token_ids) for message in messages if message.HasField("delta")]
    assert sum(sizes) == 30
    assert all(size >= 4 for size in sizes[1:-1])
    # Without it each token travels alone when the one before it has been read.
    output.min_chunk_tokens = 0
    engine.fail = lambda add, index: engine.may_step.clear()
    stream = frontend.stream(request("a b c", max_tokens=30, output=output))
    assert (await stream.next()).HasField("accepted")
    for _ in range(30):
        assert len((await stream.next()).delta.token_ids) == 1
        engine.may_step.set()
    assert [message.WhichOneof("event") for message in await stream.rest()] == ["finished"]


async def test_held_back_output_goes_when_its_time_is_over(frontend: RunningFrontend, engine: FakeEngine):
    def halt(_add: engine_core_pb2.EngineCoreRequest, index: int) -> None:
        if index == 5:
            engine.may_step.clear()

    engine.fail = halt
    output = common_pb2.OutputOptions(token_ids=True, min_chunk_tokens=1000, max_chunk_delay_ms=1)
    stream = frontend.stream(request("a b c", max_tokens=30, output=output))
    num_tokens = 0
    while num_tokens < 6:
        num_tokens += len((await stream.next()).delta.token_ids)
    engine.may_step.set()
    assert (await stream.rest())[-1].HasField("finished")


async def test_the_engine_gets_the_time_limit_of_the_call_less_the_way_back(
    frontend: RunningFrontend, engine: FakeEngine
):
    await frontend.generation.Generate(request(), timeout=30)
    await frontend.generation.Generate(request())
    timed, endless = engine.adds
    # On its way a limit of 30 s is rounded up to the next tenth.
    assert 10_000_000 < timed.deadline_in_us <= 30_100_000 - 50_000
    assert endless.deadline_in_us == 0


async def test_fields_of_a_newer_client_are_ignored(frontend: RunningFrontend):
    # Number 999, of the kind that has a length.
    unknown = b"\xba\x3e\x01x"
    generate = frontend.channel.unary_unary(
        "/stepwire.v1.GenerationService/Generate",
        request_serializer=lambda message: message.SerializeToString() + unknown,
        response_deserializer=generation_service_pb2.GenerateResponse.FromString,
    )
    assert (await generate(request("hello world", max_tokens=2))).completions[0].text == "hello world"


async def test_accepted_comes_before_the_prefill(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    stream = frontend.stream(request(sampling={"temperature": 1.0, "seed": 9}))
    assert (await stream.next()).accepted.seed == 9
    drawn = frontend.stream(request(sampling={"temperature": 1.0}))
    assert (await drawn.next()).accepted.seed == engine.adds[1].sampling.seed
    engine.may_step.set()
    assert (await stream.rest())[-1].HasField("finished")
    assert (await drawn.rest())[-1].HasField("finished")
