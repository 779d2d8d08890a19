"""vllm.grpc.engine.VllmEngine on the public port: every RPC of the table, with what gateways rely on."""

from __future__ import annotations

import asyncio
import hashlib

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from fakes.fake_engine import FakeEngine
from fakes.late_errors import fail_after
from running_frontend import SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire.v1 import common_pb2 as own_pb

Code = grpc.StatusCode
HELLO_WORLD = [50, 51, 52]


@pytest.fixture
def gateway(frontend: RunningFrontend) -> pb_grpc.VllmEngineStub:
    return pb_grpc.VllmEngineStub(frontend.channel)


def ask(*, stream: bool = False, request_id: str = "", max_tokens: int = 4, **sampling: object) -> pb.GenerateRequest:
    """A greedy request of three tokens, which the fake engine echoes again and again."""
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=HELLO_WORLD),
        sampling_params=pb.SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **sampling}),
        stream=stream,
    )


async def read(call) -> list[pb.GenerateResponse]:
    return [message async for message in call]


async def complete_of(gateway: pb_grpc.VllmEngineStub, message: pb.GenerateRequest) -> pb.GenerateComplete:
    (response,) = await read(gateway.Generate(message))
    return response.complete


async def test_a_stream_is_deltas_of_ids_then_all_of_them(gateway):
    *chunks, last = await read(gateway.Generate(ask(stream=True)))

    assert [token_id for one in chunks for token_id in one.chunk.token_ids] == [50, 51, 52, 50]
    assert all(one.chunk.completion_tokens == len(one.chunk.token_ids) for one in chunks)
    assert {one.chunk.prompt_tokens for one in chunks} == {3}
    complete = last.complete
    assert list(complete.output_ids) == [50, 51, 52, 50]
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 4)
    assert complete.WhichOneof("matched_stop") is None


async def test_without_stream_only_the_complete_comes(gateway):
    complete = await complete_of(gateway, ask())
    assert list(complete.output_ids) == [50, 51, 52, 50]
    assert (complete.index, complete.finish_reason, complete.completion_tokens) == (0, "length", 4)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_gives_one_complete_per_index(gateway, stream: bool):
    messages = await read(gateway.Generate(ask(stream=stream, n=3, temperature=1.0)))
    completes = [one.complete for one in messages if one.HasField("complete")]
    assert sorted(one.index for one in completes) == [0, 1, 2]
    assert {one.completion_tokens for one in completes} == {4}
    assert {one.chunk.index for one in messages if one.HasField("chunk")} == ({0, 1, 2} if stream else set())


async def test_a_text_prompt_is_taken_too(gateway):
    message = ask(max_tokens=2)
    message.text = "hello world"
    complete = await complete_of(gateway, message)
    assert (complete.prompt_tokens, complete.completion_tokens) == (2, 2)


async def test_stop_strings_end_the_engine_and_their_tokens_are_shown(gateway, engine: FakeEngine):
    message = ask(stream=True, max_tokens=1000, stop=["world"])
    message.text = "hello world"
    *chunks, last = await read(gateway.Generate(message))

    # Whoever makes text of the ids has to see the stop string to cut it.
    assert len(last.complete.output_ids) == 2
    assert [token_id for one in chunks for token_id in one.chunk.token_ids] == list(last.complete.output_ids)
    assert (last.complete.finish_reason, last.complete.matched_stop_str) == ("stop", "world")
    await engine.wait_until(lambda: bool(engine.aborts))
    assert list(engine.aborts[0].handles) == [engine.adds[0].handle]


async def test_a_stop_token_is_named_and_shown(gateway):
    complete = await complete_of(gateway, ask(stop_token_ids=[51], max_tokens=100))
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", 51)
    assert list(complete.output_ids) == [50, 51]


async def test_the_end_of_sequence_is_a_stop_that_matches_nothing(gateway):
    message = ask(max_tokens=100)
    message.tokenized.input_ids[:] = [50, 0]
    complete = await complete_of(gateway, message)
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", None)
    assert list(complete.output_ids) == [50, 0]


async def test_abort_ends_the_request_and_its_open_stream(gateway, frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    call = gateway.Generate(ask(stream=True, request_id="r1", max_tokens=100))
    await engine.wait_until(lambda: engine.num_live == 1)
    reading = asyncio.create_task(read(call))
    await gateway.Abort(pb.AbortRequest(request_ids=["r1", "unknown"]))

    (last,) = await reading
    assert last.complete.finish_reason == "abort"
    assert await call.code() is Code.OK
    await engine.wait_until(lambda: engine.num_live == 0)
    await frontend.wait_idle()


async def test_a_cancelled_unary_call_is_aborted_in_the_engine(gateway, frontend, engine: FakeEngine):
    engine.may_step.clear()
    call = gateway.Generate(ask(max_tokens=100))
    await engine.wait_until(lambda: engine.num_live == 1)
    call.cancel()
    await engine.wait_until(lambda: engine.num_live == 0)
    await frontend.wait_idle()
    assert frontend.metric("requests_aborted_total", reason="client_cancelled") == 1


async def test_logprobs_of_prompt_and_output(gateway):
    first, *_, last = await read(gateway.Generate(ask(stream=True, logprobs=2, prompt_logprobs=1)))
    given = first.chunk.input_logprobs
    assert list(given.token_ids) == HELLO_WORLD
    assert [one.HasField("value") for one in given.token_logprobs] == [False, True, True]
    assert [len(one.token_ids) for one in given.top_logprobs] == [0, 1, 1]
    made = first.chunk.output_logprobs
    assert list(made.token_ids) == list(first.chunk.token_ids)
    assert {len(one.values) for one in made.top_logprobs} == {2}
    assert not last.complete.HasField("output_logprobs")

    complete = await complete_of(gateway, ask(logprobs=0))
    assert list(complete.output_logprobs.token_ids) == list(complete.output_ids)
    assert len(complete.output_logprobs.token_logprobs) == 4
    assert not complete.HasField("input_logprobs")
    assert len((await complete_of(gateway, ask(prompt_logprobs=0))).input_logprobs.token_logprobs) == 3


async def test_zeros_of_plain_scalars_are_off(gateway, engine: FakeEngine):
    await read(gateway.Generate(ask(temperature=1.0, top_p=0.0, top_k=0, repetition_penalty=0.0, n=0, seed=7)))
    sampling = engine.adds[0].sampling
    assert (sampling.top_p, sampling.top_k, sampling.repetition_penalty, sampling.seed) == (1.0, 0, 1.0, 7)


def refused() -> dict[str, tuple[pb.GenerateRequest, Code, str]]:
    no_input = ask()
    no_input.ClearField("tokenized")
    media = ask()
    media.media_refs.items.add(url="http://127.0.0.1/x.png")
    handed_over = ask()
    handed_over.kv_transfer_params_json = "{}"
    too_long = ask()
    too_long.tokenized.input_ids[:] = [1] * 5000
    no_rank = ask()
    no_rank.data_parallel_rank = -1
    return {
        "no input": (no_input, Code.INVALID_ARGUMENT, "FIELD_INVALID"),
        "temperature": (ask(temperature=3.0), Code.INVALID_ARGUMENT, "FIELD_INVALID"),
        "token id": (ask(logit_bias={-1: 1.0}), Code.INVALID_ARGUMENT, "FIELD_INVALID"),
        "rank": (no_rank, Code.INVALID_ARGUMENT, "FIELD_INVALID"),
        "length": (too_long, Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED"),
        "media": (media, Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE"),
        "hand-over": (handed_over, Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE"),
        "constraint": (ask(regex="a+"), Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE"),
    }


@pytest.mark.parametrize("name", refused())
async def test_what_is_wrong_is_a_status(gateway, engine: FakeEngine, name: str):
    message, code, reason = refused()[name]
    failure = await failure_of(read(gateway.Generate(message)))
    assert (failure.code, failure.reason) == (code, reason)
    assert engine.adds == []


async def test_an_id_in_flight_is_already_there_for_both_services(gateway, frontend, engine: FakeEngine):
    engine.may_step.clear()
    call = gateway.Generate(ask(request_id="r1"))
    await engine.wait_until(lambda: engine.num_live == 1)
    failure = await failure_of(frontend.generation.Generate(request(request_id="r1")))
    assert failure.code is Code.ALREADY_EXISTS
    engine.may_step.set()
    await read(call)


async def test_a_failure_of_the_engine_in_the_middle_is_a_status(gateway, frontend, engine: FakeEngine):
    error = own_pb.EngineError(reason="REQUEST_FAILED", message="no", grpc_code=13)
    late = asyncio.create_task(fail_after(engine, frontend, 2, error))
    failure = await failure_of(read(gateway.Generate(ask(stream=True))))
    await late
    assert (failure.code, failure.reason) == (Code.INTERNAL, "REQUEST_FAILED")
    assert failure.info.metadata["tokens_emitted"] == "2"


async def test_facts_of_model_server_and_load(gateway, engine: FakeEngine):
    model = await gateway.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("fake-model", 4096, 400)
    assert (list(model.architectures), list(model.eos_token_ids)) == (["FakeForCausalLM"], [0])
    assert model.is_generation
    assert model.tokenizer_path.endswith(engine.ready.tokenizer_sha256)

    server = await gateway.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size) == ("vllm-grpc", 1)
    assert (server.max_num_seqs, server.block_size, server.is_paused) == (64, 16, False)

    loads = await gateway.GetLoads(pb.GetLoadsRequest())
    assert [(one.dp_rank, one.num_total_reqs, one.max_running_requests) for one in loads.loads] == [(0, 0, 64)]
    assert loads.dp_rank_count == 1
    assert not (await gateway.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads


async def test_health_is_that_of_the_engines(gateway, frontend: RunningFrontend, engine: FakeEngine):
    assert (await gateway.HealthCheck(pb.HealthCheckRequest())).healthy
    await engine.kill()
    await frontend.wait_until(lambda: not frontend.process.frontend.is_serving)
    answer = await gateway.HealthCheck(pb.HealthCheckRequest())
    assert not answer.healthy
    assert answer.message
    failure = await failure_of(read(gateway.Generate(ask())))
    assert failure.code is Code.UNAVAILABLE


async def test_the_tokenizer_comes_in_chunks_with_the_hash_on_the_last(gateway, engine: FakeEngine):
    chunks = [chunk async for chunk in gateway.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert data == engine.archive
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]


async def test_operations_and_what_is_not_there_are_unimplemented(gateway):
    unary = [
        gateway.FlushCache(common_pb2.FlushCacheRequest()),
        gateway.StartProfile(common_pb2.StartProfileRequest()),
        gateway.StopProfile(common_pb2.StopProfileRequest()),
    ]
    failures = [await failure_of(call) for call in unary]
    assert {(one.code, one.reason) for one in failures} == {(Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE")}


async def test_it_can_be_turned_off(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", vllm_compat="off") as running:
        await running.wait_for_health(SERVING)
        gateway = pb_grpc.VllmEngineStub(running.channel)
        failure = await failure_of(gateway.HealthCheck(pb.HealthCheckRequest()))
        assert failure.code is Code.UNIMPLEMENTED
        assert failure.reason == ""
