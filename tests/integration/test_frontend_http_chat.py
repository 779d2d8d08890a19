"""/v1/chat/completions through a real frontend and a fake engine, which echoes the prompt, with OpenAI's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import openai
import pytest

from fakes.fake_engine import FakeEngine
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from free_ports import free_port
from running_frontend import SERVING, running_frontend

MODEL = "fake-model"
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    # The echo begins with what the last user said.
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    return write_model_dir(directory, byte_level_backend(), config={"eos_token_id": 0})


@pytest.fixture
async def engine(tokenizer_dir: Path) -> AsyncIterator[FakeEngine]:
    fake = FakeEngine(tokenizer_dir, vocab_size=400)
    fake.ready.structured_output_kinds.extend(["json_schema", "json_object"])
    async with fake.running():
        yield fake


@pytest.fixture
async def url(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[str]:
    port = free_port()
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", http_port=port) as running:
        await running.wait_for_health(SERVING)
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=30) as client:
        yield client


def said(text: str, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "stop": "STOP", "max_tokens": 60, **fields}


async def test_a_chat_and_its_stream_agree(client: openai.AsyncOpenAI):
    whole = await client.chat.completions.create(**said("yes and STOP"))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await client.chat.completions.create(**said("yes and STOP", **options))
    chunks = [chunk async for chunk in stream]
    first, *parts, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "yes and "
    assert whole.choices[0].message.content == "yes and "
    assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage) == ([], whole.usage)
    assert whole.id.startswith("chatcmpl-")
    assert (whole.object, first.object) == ("chat.completion", "chat.completion.chunk")


async def test_parts_of_a_message_and_logprobs(client: openai.AsyncOpenAI):
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two STOP"}]
    request = said("", logprobs=True, top_logprobs=2, max_completion_tokens=5)
    answer = await client.chat.completions.create(**{**request, "messages": [{"role": "user", "content": content}]})
    tokens = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content.startswith("one\nt")
    assert bytes(tokens[0].bytes).decode() == tokens[0].token
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)


async def test_a_required_call_is_read_from_the_grammars_text(client: openai.AsyncOpenAI, engine: FakeEngine):
    text = '[{"name": "add", "parameters": {"a": 1}}]'
    answer = await client.chat.completions.create(**said(f"{text}STOP", tools=[TOOL], tool_choice="required"))
    assert engine.adds[-1].structured_output.WhichOneof("spec") == "json_schema"
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "add", '{"a": 1}')
    assert choice.finish_reason == "tool_calls"
    stream = await client.chat.completions.create(
        **said(f"{text}STOP", tools=[TOOL], tool_choice="required", stream=True)
    )
    parts = [part async for chunk in stream for part in _calls(chunk)]
    assert parts[0].id
    assert parts[0].function.name == "add"
    assert "".join(part.function.arguments for part in parts) == '{"a": 1}'


def _calls(chunk):
    return chunk.choices[0].delta.tool_calls or ()


async def test_response_format_reaches_the_engine(client: openai.AsyncOpenAI, engine: FakeEngine):
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await client.chat.completions.create(**said("{}STOP", response_format=form))
    text = engine.adds[-1].structured_output.json_schema
    assert text.index('"b"') < text.index('"a"')
    await client.chat.completions.create(**said("{}STOP", response_format={"type": "json_object"}))
    assert engine.adds[-1].structured_output.WhichOneof("spec") == "json_object"


BAD_FIELDS = {
    "messages": ({"messages": []}, 400, "messages"),
    "role": ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        501,
        "messages[0].content[0].image_url",
    ),
    "top_logprobs": ({"top_logprobs": 2}, 400, "top_logprobs"),
    "too many": ({"logprobs": True, "top_logprobs": 99}, 400, "top_logprobs"),
    "max": ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    "choice": ({"tool_choice": "sometimes"}, 400, "tool_choice"),
    "schema": ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
async def test_a_bad_field_is_named(url: str, name: str):
    fields, status, param = BAD_FIELDS[name]
    async with httpx2.AsyncClient(timeout=30) as http:
        response = await http.post(f"{url}/chat/completions", json={**said("x"), **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
