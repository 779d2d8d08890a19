"""EmbeddingService and /v1/embeddings through real sockets, before a fake engine: order, limits, errors, ends."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx2
import numpy as np
import openai
import pytest
from google.protobuf.json_format import ParseDict

from fakes.fake_engine import FakeEngine
from fakes.fake_pooling import HIDDEN_SIZE, wire_vector
from free_ports import free_port
from frontend.input_processor.embedding import MAX_INPUTS, MAX_VECTOR_BYTES
from running_frontend import SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2
from stepwire.v1 import common_pb2
from stepwire.v1.embedding_service_pb2 import EmbedRequest
from stepwire.v1.generation_service_pb2 import AbortRequest
from stepwire.v1.model_service_pb2 import ListModelsRequest

Code = grpc.StatusCode
UNSCALED = engine_core_pb2.PoolingParams(task="embed", normalize=False)
SCALED = engine_core_pb2.PoolingParams(task="embed")


def ask(*inputs: str | list[int], **fields: object) -> EmbedRequest:
    return EmbedRequest(
        inputs=[
            EmbedRequest.Input(text=one)
            if isinstance(one, str)
            else EmbedRequest.Input(token_ids=common_pb2.TokenIds(ids=one))
            for one in inputs
        ],
        **fields,
    )


def expected(token_ids: list[int], params: engine_core_pb2.PoolingParams = SCALED) -> list[float]:
    return np.frombuffer(wire_vector(token_ids, params), "<f4").tolist()


@pytest.fixture
async def frontend(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[RunningFrontend]:
    settings = {"http_port": free_port(), "max_concurrent_requests": 8}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", **settings) as running:
        await running.wait_for_health(SERVING)
        yield running


@pytest.fixture
async def http(frontend: RunningFrontend) -> AsyncIterator[httpx2.AsyncClient]:
    url = f"http://127.0.0.1:{frontend.process._settings.http_port}"
    async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
        yield client


@pytest.fixture
async def client(frontend: RunningFrontend) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{frontend.process._settings.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=30) as client:
        yield client


async def test_vectors_come_in_the_order_of_the_inputs_and_usage_is_that_of_all(
    frontend: RunningFrontend, engine: FakeEngine
):
    call = frontend.embedding.Embed(ask("hello", [7, 8, 9], [5], normalize=False, request_id="mine"))
    response = await call
    by_text = next(add for add in engine.adds if add.request_id == "mine-0")
    prompts = [token_array.unpack(by_text.prompt_token_ids), [7, 8, 9], [5]]
    assert [list(one.values) for one in response.embeddings] == [expected(prompt, UNSCALED) for prompt in prompts]
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(prompts[0]) + 4, 0)
    assert response.request_id == "mine"
    headers = dict(await call.initial_metadata())
    assert (headers["x-request-id"], headers["x-engine-id"]) == ("mine", "fake-0")
    assert {add.request_id for add in engine.adds} == {"mine-0", "mine-1", "mine-2"}
    assert {(add.max_tokens, add.pooling.task, add.HasField("logprobs")) for add in engine.adds} == {
        (0, "embed", False)
    }
    await frontend.wait_idle()
    assert frontend.maps == (0, 0)
    assert frontend.metric("requests_finished_total", **labels("stop")) == 3


def labels(reason: str) -> dict[str, str]:
    return {"model_name": "fake-model", "engine_id": "fake-0", "finished_reason": reason}


async def test_options_reach_the_engine(frontend: RunningFrontend, engine: FakeEngine):
    one = ask(list(range(5, 25)), dimensions=2, normalize=True, truncate_prompt_tokens=3, request_id="x")
    response = await frontend.embedding.Embed(one)
    [add] = engine.adds
    assert token_array.unpack(add.prompt_token_ids) == [22, 23, 24]
    assert (add.request_id, add.pooling.dimensions, add.pooling.normalize) == ("x", 2, True)
    assert len(response.embeddings[0].values) == 2
    await frontend.embedding.Embed(ask([5]))
    assert not engine.adds[-1].pooling.HasField("normalize")


async def test_an_input_may_fill_the_context_and_not_more(frontend: RunningFrontend, engine: FakeEngine):
    assert (await frontend.embedding.Embed(ask([5] * 4096))).usage.prompt_tokens == 4096
    failure = await failure_of(frontend.embedding.Embed(ask([5], [5] * 4097)))
    assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert failure.fields == ["inputs[1].token_ids"]
    assert "the context holds 4096 tokens" in failure.message
    assert "output" not in failure.message
    cut = await frontend.embedding.Embed(ask([5] * 5000, truncate_prompt_tokens=-1))
    assert cut.usage.prompt_tokens == 4096


REFUSED = {
    "no inputs": ({}, "inputs", "FIELD_INVALID"),
    "too many": ({"inputs": [{"text": "a"}] * 9}, "inputs", "FIELD_INVALID"),
    "neither text nor ids": ({"inputs": [{"text": "a"}, {}]}, "inputs[1].prompt", "FIELD_INVALID"),
    "an empty text": ({"inputs": [{"text": ""}]}, "inputs[0].text", "FIELD_INVALID"),
    "an unknown id": ({"inputs": [{"token_ids": {"ids": [5, 400]}}]}, "inputs[0].token_ids.ids[1]", "FIELD_INVALID"),
    "no dimensions": ({"inputs": [{"text": "a"}], "dimensions": 0}, "dimensions", "FIELD_INVALID"),
    "more dimensions": ({"inputs": [{"text": "a"}], "dimensions": HIDDEN_SIZE + 1}, "dimensions", "FIELD_INVALID"),
    "a cut of nothing": (
        {"inputs": [{"text": "a"}], "truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        "FIELD_INVALID",
    ),
}


async def test_what_is_wrong_is_named(frontend: RunningFrontend):
    for name, (message, field, reason) in REFUSED.items():
        failure = await failure_of(frontend.embedding.Embed(ParseDict(message, EmbedRequest())))
        found = (failure.code, failure.reason, failure.fields)
        assert found == (Code.INVALID_ARGUMENT, reason, [field]), name


async def test_another_model_is_not_found(frontend: RunningFrontend):
    failure = await failure_of(frontend.embedding.Embed(ask("a", model="other")))
    assert (failure.code, failure.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_vectors_that_fit_no_answer_are_refused_before_any_work(engine: FakeEngine, tmp_path: Path):
    engine.ready.embedding_dimensions = MAX_VECTOR_BYTES // (4 * 1000)
    settings = {"max_concurrent_requests": 4 * MAX_INPUTS}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", **settings) as running:
        await running.wait_for_health(SERVING)
        for count in (1001, MAX_INPUTS + 1):
            failure = await failure_of(running.embedding.Embed(ask(*["a"] * count)))
            assert (failure.code, failure.fields) == (Code.INVALID_ARGUMENT, ["inputs"])
        assert f"1 up to {MAX_INPUTS}" in failure.message
    assert engine.adds == []


async def test_a_model_that_does_not_pool_is_unimplemented_and_says_so(engine: FakeEngine, tmp_path: Path):
    engine.ready.embedding_dimensions = 0
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache") as running:
        await running.wait_for_health(SERVING)
        failure = await failure_of(running.embedding.Embed(ask("a")))
        assert (failure.code, failure.reason) == (Code.UNIMPLEMENTED, "UNSUPPORTED_FEATURE")
        [model] = (await running.models.ListModels(ListModelsRequest())).models
        assert not model.capabilities.embeddings


async def test_the_capability_is_told(frontend: RunningFrontend):
    [model] = (await frontend.models.ListModels(ListModelsRequest())).models
    assert model.capabilities.embeddings


async def test_each_input_takes_a_permit(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    stream = frontend.stream(request())
    await stream.next()
    failure = await failure_of(frontend.embedding.Embed(ask(*["a"] * 8)))
    assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    engine.may_step.set()
    await stream.rest()
    await frontend.wait_idle()
    assert len((await frontend.embedding.Embed(ask(*["a"] * 8))).embeddings) == 8


async def test_one_input_that_fails_ends_the_others_and_the_call(frontend: RunningFrontend, engine: FakeEngine):
    error = common_pb2.EngineError(reason="KV_CAPACITY", message="too long", grpc_code=9)
    engine.reject = lambda add: error if add.request_id == "a-1" else None
    engine.may_step.clear()
    failure = await failure_of(frontend.embedding.Embed(ask([5], [6], [7], request_id="a")))
    assert (failure.code, failure.reason) == (Code.FAILED_PRECONDITION, "KV_CAPACITY")
    assert failure.info.metadata["request_id"] == "a-1"
    await engine.wait_until(lambda: engine.num_live == 0)
    assert frontend.maps == (0, 0)


async def test_a_cancelled_call_ends_its_inputs_in_the_engine(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    call = frontend.embedding.Embed(ask("a", "b", "c"))
    await engine.wait_until(lambda: engine.num_live == 3)
    call.cancel()
    await engine.wait_until(lambda: engine.num_live == 0)
    assert frontend.metric("requests_aborted_total", reason="client_cancelled") == 3


async def test_an_abort_ends_the_call_as_cancelled(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    call = asyncio.ensure_future(failure_of(frontend.embedding.Embed(ask("a", request_id="mine"))))
    await engine.wait_until(lambda: engine.num_live == 1)
    await frontend.generation.Abort(AbortRequest(request_ids=["mine"]))
    assert (await call).code is Code.CANCELLED


async def test_a_deadline_is_met(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    failure = await failure_of(frontend.embedding.Embed(ask("a", "b"), timeout=0.5))
    assert failure.code is Code.DEADLINE_EXCEEDED
    await engine.wait_until(lambda: engine.num_live == 0)


async def test_openais_client_gets_the_same_vectors_in_either_encoding(client: openai.AsyncOpenAI):
    for given, prompts in (([7, 8], [[7, 8]]), ([[5], [6, 7]], [[5], [6, 7]])):
        # Base64 where nothing is said.
        for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = await client.embeddings.create(model="fake-model", input=given, user="somebody", **encoding)
            vectors = [decoded(one.embedding) for one in answer.data]
            assert vectors == [expected(prompt) for prompt in prompts]
            assert [one.index for one in answer.data] == list(range(len(prompts)))
            total = sum(map(len, prompts))
            assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("fake-model", total, total)


def decoded(embedding: list[float] | str) -> list[float]:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4").tolist()
    return [float(np.float32(value)) for value in embedding]


async def test_openais_client_sends_texts_and_dimensions(client: openai.AsyncOpenAI, engine: FakeEngine):
    one = await client.embeddings.create(model="fake-model", input="hello", dimensions=3)
    two = await client.embeddings.create(model="fake-model", input=["hello", "world"])
    assert (len(one.data[0].embedding), [len(item.embedding) for item in two.data]) == (3, [HIDDEN_SIZE] * 2)
    # Two inputs of one call are tokenized side by side, and the second may be first.
    assert engine.adds[0].prompt_token_ids in [add.prompt_token_ids for add in engine.adds[1:]]


BAD_BODIES = {
    "no input": ({"model": "fake-model"}, 400, "input"),
    "an empty list": ({"input": []}, 400, "input"),
    "an empty text": ({"input": ["a", ""]}, 400, "input[1].text"),
    "a number": ({"input": 7}, 400, "input"),
    "an encoding": ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    "dimensions": ({"input": "a", "dimensions": 7}, 400, "dimensions"),
    "another model": ({"input": "a", "model": "other"}, 404, "model"),
    "a priority": ({"input": "a", "priority": 1}, 501, "priority"),
}


async def test_a_bad_body_names_the_field(http: httpx2.AsyncClient):
    for name, (body, status, param) in BAD_BODIES.items():
        response = await http.post("/v1/embeddings", json=body, headers={"x-request-id": "mine"})
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), name
        assert response.headers["x-request-id"] == "mine"


async def test_a_client_that_hangs_up_ends_the_work(
    http: httpx2.AsyncClient, frontend: RunningFrontend, engine: FakeEngine
):
    engine.may_step.clear()
    call = asyncio.create_task(http.post("/v1/embeddings", json={"input": ["a", "b"]}))
    await engine.wait_until(lambda: engine.num_live == 2)
    call.cancel()
    await engine.wait_until(lambda: engine.num_live == 0)
    assert frontend.maps == (0, 0)


async def test_the_openapi_document_has_the_route_and_its_body(http: httpx2.AsyncClient):
    document = (await http.get("/openapi.json")).json()
    assert "#/components/schemas/EmbeddingBody" in json.dumps(document["paths"]["/v1/embeddings"])
    assert "dimensions" in document["components"]["schemas"]["EmbeddingBody"]["properties"]


async def test_engines_that_pool_differently_do_not_serve_together(tokenizer_dir: Path, tmp_path: Path):
    one, two = (FakeEngine(tokenizer_dir, vocab_size=400, engine_id=f"fake-{number}") for number in range(2))
    two.ready.features[:] = ["pooling:mean"]
    async with (
        one.running(),
        two.running(),
        running_frontend(one.endpoint, two.endpoint, cache_dir=tmp_path / "cache") as running,
    ):
        await running.wait_for_health(SERVING)
        reason = {"reason": "POOLING_MISMATCH"}
        await running.wait_until(lambda: running.metric("engine_refusals_total", **reason) >= 1)
