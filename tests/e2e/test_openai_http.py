"""OpenAI's own clients, Python's and Node's, against both real processes and the real model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from conformance.runners import node_program
from free_ports import free_port
from running_stack import SERVING, Service, running_stack, wait_until_zero

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def stack(
    embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, openai.OpenAI]]:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        engine, port = stack.engine(), free_port()
        stack.frontend(engine, http_port=port).wait_for_health(SERVING)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client:
            yield engine, client


@pytest.fixture
def client(stack: tuple[Service, openai.OpenAI]) -> openai.OpenAI:
    return stack[1]


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_completion_streamed_and_whole_with_logprobs(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
    assert "Paris" in text
    assert whole.choices[0].text == text
    assert chunks[-1].usage.completion_tokens == 8
    assert "".join(whole.choices[0].logprobs.tokens) == text


def test_chat_streamed_and_whole_with_choices_and_seed(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "messages": QUESTION, "max_completion_tokens": 16, "n": 2, "seed": 3, "temperature": 1}
    whole = client.chat.completions.create(**options)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in whole.choices] == [texts[0], texts[1]]


def test_a_stop_string_ends_the_answer(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=40, stop="Paris")
    assert answer.choices[0].finish_reason == "stop"
    assert "Paris" not in answer.choices[0].message.content


def test_a_required_tool_is_called(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=100,
        tools=[TOOL],
        tool_choice="required",
        # A small model would go on with more calls.
        parallel_tool_calls=False,
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_response_format_holds(client: openai.OpenAI, model: str) -> None:
    schema = TOOL["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=60, response_format=form
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"city"}


def test_errors_have_openais_classes(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", top_p=7)
    assert (caught.value.param, caught.value.type) == ("top_p", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", extra_body={"guided_regex": "("})
    assert caught.value.code == "grammar_invalid"


def test_a_stream_that_is_dropped_frees_its_cache(stack: tuple[Service, openai.OpenAI], model: str) -> None:
    engine, client = stack
    stream = client.completions.create(
        model=model, prompt="Once", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until_cache_is_free(engine)


def wait_until_cache_is_free(engine: Service) -> None:
    wait_until_zero(engine, "stepwire_engine_core_kv_cache_usage_ratio")


@pytest.fixture(scope="module")
def node(stack: tuple[Service, openai.OpenAI]) -> dict[str, Any]:
    """What each case of openai_node.mjs came to. Its last one drops a stream, which the engine must notice."""
    engine, client = stack
    command = [*node_program("openai"), str(Path(__file__).parent / "openai_node.mjs"), str(client.base_url)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            wait_until_cache_is_free(engine)
        process.stdin.close()
        assert process.wait(30) == 0
    results: dict[str, Any] = json.loads(line)
    return results


def test_node_chats_streamed_and_whole(node: dict[str, Any], client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=16)
    assert node["models"] == model
    assert node["chat"] == node["chat_stream"]["text"] == whole.choices[0].message.content
    assert node["chat_stream"]["usage"] == whole.usage.model_dump(exclude_unset=True)


def test_node_completes(node: dict[str, Any]) -> None:
    assert "Paris" in node["completion"]["text"]
    assert node["completion"]["usage"]["completion_tokens"] == 8


def test_node_gets_the_named_tool_and_the_json_it_asks_for(node: dict[str, Any]) -> None:
    (call,) = node["named_tool"]
    assert call["name"] == "get_weather"
    assert set(json.loads(call["arguments"])) == {"city"}
    assert set(node["json_schema"]) == {"city"}


def test_node_gets_openais_errors(node: dict[str, Any]) -> None:
    bad, unknown = node["bad_request"], node["not_found"]
    assert (bad["class"], bad["status"], bad["param"]) == ("BadRequestError", 400, "top_p")
    assert bad["type"] == "invalid_request_error"
    assert (unknown["class"], unknown["status"], unknown["code"]) == ("NotFoundError", 404, "model_not_found")


def test_node_drops_a_stream_and_the_engine_notices(node: dict[str, Any]) -> None:
    assert node["abort"] == "text_completion"


def test_node_gets_the_vectors_that_python_gets(node: dict[str, Any], client: openai.OpenAI, model: str) -> None:
    answer = client.embeddings.create(model=model, input=["one text", "another"])
    for ours, theirs in zip(answer.data, node["embeddings"], strict=True):
        assert theirs == pytest.approx(ours.embedding, abs=1e-5)
