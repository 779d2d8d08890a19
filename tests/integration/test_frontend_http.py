"""The OpenAI-compatible HTTP API on a real socket, with OpenAI's own client and without, before a fake engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import openai
import pytest

from fakes.fake_engine import FakeEngine
from fakes.late_errors import fail_after
from free_ports import free_port
from running_frontend import SERVING, RunningFrontend, running_frontend
from stepwire.v1 import common_pb2

PROMPT = {"model": "fake-model", "prompt": "hello world", "max_tokens": 4, "temperature": 0}


@pytest.fixture
async def frontend(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[RunningFrontend]:
    port = free_port()
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", http_port=port) as running:
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


def events_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


async def test_a_completion_and_its_stream_agree(client: openai.AsyncOpenAI):
    whole = await client.completions.create(**PROMPT)
    stream = await client.completions.create(**PROMPT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "hello worldhello world"
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert whole.usage == chunks[-1].usage
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (4, 4 + whole.usage.prompt_tokens)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert whole.model == "fake-model"
    assert whole.system_fingerprint


async def test_a_stream_ends_with_done_and_has_ids_in_its_headers(http: httpx2.AsyncClient):
    response = await http.post("/v1/completions", json={**PROMPT, "stream": True}, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-engine-id"] == "fake-0"
    *chunks, last = events_of(response.text)
    assert last == "[DONE]"
    assert {json.loads(chunk)["id"] for chunk in chunks} == {"cmpl-mine"}


async def test_several_prompts_and_choices_are_indexed_in_order(client: openai.AsyncOpenAI, engine: FakeEngine):
    options = {**PROMPT, "temperature": 1, "n": 2, "seed": 5}
    answer = await client.completions.create(**{**options, "prompt": ["abcd", "wxyz"]})
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["abcd", "abcd", "wxyz", "wxyz"]
    assert answer.usage.completion_tokens == 16
    by_ids = await client.completions.create(**{**options, "prompt": [[5, 6], [7]], "n": 1})
    assert len(by_ids.choices) == 2
    assert [list(add.prompt_token_ids) for add in engine.adds[-2:]] == [[5, 0, 0, 0, 6, 0, 0, 0], [7, 0, 0, 0]]


async def test_fields_reach_the_engine(http: httpx2.AsyncClient, engine: FakeEngine):
    extras = {"top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True}
    usual = {"top_p": 0.5, "seed": 9, "logit_bias": {"5": 3}, "stop_token_ids": [11], "cache_salt": "s"}
    body = {**PROMPT, "temperature": 0.5, **extras, **usual, "nobody_knows": 1, "guided_choice": None}
    engine.ready.structured_output_kinds.append("regex")
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    add = engine.adds[-1]
    assert (add.sampling.top_k, add.sampling.min_p, add.sampling.repetition_penalty) == (7, 0.25, 1.5)
    assert (add.min_tokens, add.ignore_eos, add.cache_salt, add.sampling.seed) == (2, True, "s", 9)
    assert (list(add.sampling.logit_bias_token_ids), list(add.stop_token_ids)) == ([5], [11])


async def test_stop_strings_end_the_text(client: openai.AsyncOpenAI):
    answer = await client.completions.create(**{**PROMPT, "max_tokens": 50}, stop=["o w"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hell", "stop")
    assert answer.choices[0].stop_reason == "o w"


async def test_completion_logprobs_and_echo(client: openai.AsyncOpenAI):
    answer = await client.completions.create(**{**PROMPT, "prompt": "ab", "max_tokens": 2}, logprobs=2, echo=True)
    choice = answer.choices[0]
    assert choice.text == "abab"
    assert choice.logprobs.tokens == ["a", "b", "a", "b"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.top_logprobs[0] is None
    assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs[1:])


BAD_BODIES = {
    "not JSON": (b"{", None, "field_invalid"),
    "wrong type": (json.dumps({**PROMPT, "temperature": "hot"}).encode(), "temperature", "field_invalid"),
    "number for a bool": (json.dumps({**PROMPT, "stream": 1}).encode(), "stream", "field_invalid"),
    "no prompt": (b'{"model": "fake-model"}', "prompt", "field_invalid"),
    "empty prompts": (json.dumps({**PROMPT, "prompt": []}).encode(), "prompt", "field_invalid"),
    "range": (json.dumps({**PROMPT, "top_p": 7}).encode(), "top_p", "field_invalid"),
    "negative count": (json.dumps({**PROMPT, "max_tokens": -1}).encode(), "max_tokens", "field_invalid"),
    "token id": (json.dumps({**PROMPT, "prompt": [1, 400]}).encode(), "prompt[1]", "field_invalid"),
    "stop": (json.dumps({**PROMPT, "stop": ["a", ""]}).encode(), "stop[1]", "field_invalid"),
    "too long": (json.dumps({**PROMPT, "prompt": [5] * 99_000}).encode(), "prompt", "context_length_exceeded"),
    "5 MiB": (json.dumps({**PROMPT, "prompt": "a" * 5 * 2**20}).encode(), "prompt", "context_length_exceeded"),
    "stream options": (json.dumps({**PROMPT, "stream_options": {}}).encode(), "stream_options", "field_invalid"),
    "two constraints": (
        json.dumps({**PROMPT, "guided_regex": "a", "response_format": {"type": "json_object"}}).encode(),
        "guided_regex",
        "field_invalid",
    ),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_body_is_400_and_names_the_field(http: httpx2.AsyncClient, engine: FakeEngine, name: str):
    body, param, code = BAD_BODIES[name]
    response = await http.post("/v1/completions", content=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert response.headers["x-should-retry"] == "false"
    assert engine.adds == []


async def test_statuses_of_refusals(http: httpx2.AsyncClient):
    async def post(**fields: object) -> tuple[int, str]:
        response = await http.post("/v1/completions", json={**PROMPT, **fields})
        return response.status_code, response.json()["error"]["code"]

    assert await post(model="other") == (404, "model_not_found")
    assert await post(suffix="x") == (501, "unsupported_feature")
    assert await post(priority=1) == (501, "unsupported_feature")
    missing = (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405))
    for method, path, status in missing:
        response = await http.request(method, path)
        assert (response.status_code, set(response.json()["error"])) == (status, {"message", "type", "param", "code"})


async def test_a_body_beyond_the_limit_is_413(http: httpx2.AsyncClient):
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 1024 * 1024

    response = await http.post("/v1/completions", content=parts())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


ENGINE_REFUSALS = {"QUEUE_FULL": (8, 429), "KV_CAPACITY": (9, 400), "ENGINE_PAUSED": (9, 409), "DRAINING": (14, 503)}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("reason", ENGINE_REFUSALS)
async def test_a_refusal_of_the_engine_is_a_status(
    http: httpx2.AsyncClient, engine: FakeEngine, reason: str, is_stream: bool
):
    number, status = ENGINE_REFUSALS[reason]
    engine.reject = lambda add: common_pb2.EngineError(reason=reason, message="no", grpc_code=number)
    response = await http.post("/v1/completions", json={**PROMPT, "stream": is_stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, reason.lower())
    assert response.headers.get("retry-after") == ("1" if status in (429, 503) else None)


async def test_an_error_before_the_first_token_is_a_status_also_of_a_stream(
    client: openai.AsyncOpenAI, engine: FakeEngine
):
    engine.fail = lambda add, index: common_pb2.EngineError(reason="GRAMMAR_INVALID", message="no", grpc_code=3)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**PROMPT, stream=True)
    assert caught.value.code == "grammar_invalid"


async def test_an_error_after_the_first_token_is_an_event_and_the_end(
    http: httpx2.AsyncClient, frontend: RunningFrontend, engine: FakeEngine
):
    error = common_pb2.EngineError(reason="REQUEST_FAILED", message="odd", grpc_code=13)
    late = asyncio.create_task(fail_after(engine, frontend, 2, error))
    response = await http.post("/v1/completions", json={**PROMPT, "stream": True})
    await late
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    last = [part for part in response.text.split("\n\n") if part][-1]
    kind, data = last.split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "request_failed"


async def test_openais_client_raises_on_that_event(
    client: openai.AsyncOpenAI, frontend: RunningFrontend, engine: FakeEngine
):
    error = common_pb2.EngineError(reason="REQUEST_FAILED", message="odd", grpc_code=13)
    late = asyncio.create_task(fail_after(engine, frontend, 2, error))
    stream = await client.completions.create(**PROMPT, stream=True)
    with pytest.raises(openai.APIError, match="odd"):
        async for _ in stream:
            pass
    await late


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_goes_away_aborts(
    http: httpx2.AsyncClient, frontend: RunningFrontend, engine: FakeEngine, is_stream: bool
):
    engine.may_step.clear()
    body = {**PROMPT, "prompt": ["a", "b"], "max_tokens": 1000, "stream": is_stream}
    call = asyncio.create_task(http.post("/v1/completions", json=body))
    await engine.wait_until(lambda: engine.num_live == 2)
    call.cancel()
    await engine.wait_until(lambda: engine.num_live == 0)
    await frontend.wait_idle()
    assert frontend.maps == (0, 0)
    assert frontend.metric("requests_aborted_total", reason="client_cancelled") == 2


async def test_one_prompt_that_fails_ends_the_others(
    http: httpx2.AsyncClient, frontend: RunningFrontend, engine: FakeEngine
):
    error = common_pb2.EngineError(reason="REQUEST_FAILED", message="odd", grpc_code=13)
    engine.fail = lambda add, index: error if add.request_id.endswith("-1") else None
    response = await http.post("/v1/completions", json={**PROMPT, "prompt": ["a", "b"], "max_tokens": 1000})
    assert response.status_code == 500
    await engine.wait_until(lambda: engine.num_live == 0)
    assert frontend.maps == (0, 0)


async def test_an_id_in_flight_is_409(http: httpx2.AsyncClient, engine: FakeEngine):
    engine.may_step.clear()
    first = asyncio.create_task(http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "same"}))
    await engine.wait_until(lambda: engine.num_live == 1)
    second = await http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "same"})
    engine.may_step.set()
    assert (second.status_code, second.json()["error"]["code"]) == (409, "duplicate_request")
    assert (await first).status_code == 200


async def test_models_tokens_health_version_and_the_document(http: httpx2.AsyncClient, client: openai.AsyncOpenAI):
    models = await client.models.list()
    assert [model.id for model in models.data] == ["fake-model"]
    assert (await client.models.retrieve("fake-model")).owned_by == "stepwire"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")
    tokens = (await http.post("/tokenize", json={"prompt": "hello"})).json()
    assert tokens["count"] == len(tokens["tokens"]) >= 1
    assert tokens["max_model_len"] == 4096
    text = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "hello"}
    assert (await http.post("/tokenize", json={})).json()["error"]["param"] == "prompt"
    assert (await http.post("/detokenize", json={"tokens": [4000]})).json()["error"]["param"] == "tokens"
    assert (await http.get("/health")).status_code == 200
    assert "version" in (await http.get("/version")).json()
    document = (await http.get("/openapi.json")).json()
    assert "temperature" in document["components"]["schemas"]["ChatBody"]["properties"]
    assert "#/components/schemas/CompletionBody" in json.dumps(document["paths"]["/v1/completions"])
    assert "swagger" in (await http.get("/docs")).text


async def test_requests_are_counted_by_route(http: httpx2.AsyncClient, frontend: RunningFrontend):
    await http.post("/v1/completions", json=PROMPT)
    await http.get("/secret/path")
    counted = {"method": "POST", "status": "200", "handler": "/v1/completions"}
    await frontend.wait_for_metric(1, "http_requests_total", **counted)
    await frontend.wait_for_metric(1, "http_requests_total", method="GET", status="404", handler="unknown")


async def test_a_drain_refuses_new_requests_and_finishes_the_others(
    http: httpx2.AsyncClient, frontend: RunningFrontend, engine: FakeEngine
):
    engine.may_step.clear()
    running = asyncio.create_task(http.post("/v1/completions", json=PROMPT))
    await engine.wait_until(lambda: engine.num_live == 1)
    frontend.process.drain.begin(60, "test")
    refused = await http.post("/v1/completions", json=PROMPT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert (await http.get("/health")).status_code == 503
    engine.may_step.set()
    assert (await running).status_code == 200


async def test_nothing_of_a_prompt_is_logged_or_told(http: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG", "frontend")
    canary = "canary-7261"
    for fields in ({"prompt": canary, "top_p": 7}, {"prompt": [canary, 3]}, {"prompt": "x", "stop": [canary * 200]}):
        response = await http.post("/v1/completions", json={**PROMPT, **fields})
        assert response.status_code == 400
        assert canary not in response.text
    assert canary not in caplog.text
