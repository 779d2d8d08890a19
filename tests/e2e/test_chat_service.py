"""Chats with the real model through both services: answers, calls, answers that go on, and streams that break."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from frontend.output_parsers.choice import output_parser
from frontend.output_parsers.interface import ContentDelta, ParserOptions, ToolCallDelta
from running_stack import SERVING, Frontend, Service, Stack, running_stack, wait_until_zero
from stepwire.v1 import common_pb2
from stepwire.v1.chat_service_pb2 import ChatRequest, ChatStreamResponse
from stepwire.v1.generation_service_pb2 import GenerateRequest
from stepwire.v1.tokenization_service_pb2 import RenderChatRequest

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
QUESTION = {"role": "ROLE_USER", "content": [{"text": "What is the capital of France?"}]}
CITY = {"type": "string", "enum": ["Paris", "London", "Rome"]}
# A call of `weather` without `celsius`, which its schema requires.
HERMES_EXAMPLE = 'I will look it up.\n<tool_call>\n{"name": "weather", "arguments": {"city": "CITY"}}\n</tool_call>'
EXAMPLES = {
    "llama3_json": '{"name": "weather", "parameters": {"city": "CITY"}}',
    "mistral": 'I will look it up.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "CITY"}}]',
    "qwen3_coder": "I will look it up.\n<tool_call>\n<function=weather>\n<parameter=city>\nCITY\n</parameter>\n"
    "</function>\n</tool_call>",
}
TOOLS = [
    {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": CITY, "celsius": {"type": "boolean"}},
            "required": ["city", "celsius"],
            "additionalProperties": False,
        },
    },
    {
        "name": "population",
        "parameters": {
            "type": "object",
            "properties": {"city": CITY},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
]


@pytest.fixture(scope="module")
def engine(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Service]]:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        yield stack, stack.engine()


@pytest.fixture(scope="module")
def stack(engine: tuple[Stack, Service]) -> tuple[Service, Frontend]:
    # The model's template knows no calls, so nothing says in which family's way it might write them.
    frontend = engine[0].frontend(engine[1], flags=("--tool-call-parser", "hermes"))
    frontend.wait_for_health(SERVING)
    return engine[1], frontend


@pytest.fixture(scope="module")
def other_frontends(engine: tuple[Stack, Service]) -> dict[str, Frontend]:
    """By the parser of calls that each has."""
    stack, service = engine
    frontends = {name: stack.frontend(service, flags=("--tool-call-parser", name)) for name in EXAMPLES}
    for frontend in frontends.values():
        frontend.wait_for_health(SERVING)
    return frontends


@pytest.fixture
def frontend(stack: tuple[Service, Frontend]) -> Frontend:
    return stack[1]


def chat(**fields: object) -> ChatRequest:
    defaults = {"messages": [QUESTION], "sampling": {"temperature": 0}, "stop": {"maxTokens": 48}}
    return json_format.ParseDict({**defaults, **fields}, ChatRequest())


def stream(frontend: Frontend, request: ChatRequest) -> list[ChatStreamResponse]:
    return list(frontend.chat.ChatStream(request, timeout=TIMEOUT_S))


def content(messages: list[ChatStreamResponse]) -> str:
    return "".join(message.delta.content for message in messages)


def token_ids(messages: list[ChatStreamResponse]) -> list[int]:
    return [token_id for message in messages for token_id in message.delta.token_ids]


def num_merged(messages: list[ChatStreamResponse]) -> int:
    """Tokens that came together with another one, as they do when the frontend is late. Needs token ids."""
    return sum(max(0, len(message.delta.token_ids) - 1) for message in messages)


def test_an_answer_streams_and_is_the_unary_one(frontend: Frontend) -> None:
    messages = stream(frontend, chat(output={"tokenIds": True}))
    assert [message.index for message in messages] == list(range(len(messages)))
    assert "Paris" in content(messages)
    finished = messages[-1].finished
    # The end of a turn is the model's own end-of-sequence token, and not part of the text.
    assert finished.reason == common_pb2.FINISH_REASON_STOP
    assert "<|im_end|>" not in content(messages)
    assert len(messages) + num_merged(messages) > 4
    answer = frontend.chat.Chat(chat(), timeout=TIMEOUT_S)
    assert answer.choices[0].message.content[0].text == content(messages)
    assert answer.usage.prompt_tokens == finished.usage.prompt_tokens == messages[0].accepted.prompt_tokens


def test_the_conversation_so_far_counts(frontend: Frontend) -> None:
    first = frontend.chat.Chat(chat(), timeout=TIMEOUT_S).choices[0].message
    request = chat()
    request.messages.append(first)
    request.messages.add(role="ROLE_USER", content=[{"text": "And which river flows through it?"}])
    rendered = frontend.tokenization.RenderChat(RenderChatRequest(chat=request), timeout=TIMEOUT_S)
    assert f"<|im_start|>assistant\n{first.content[0].text}<|im_end|>" in rendered.text
    assert frontend.chat.Chat(request, timeout=TIMEOUT_S).usage.prompt_tokens == len(rendered.token_ids)


def test_a_required_call_is_a_valid_one(frontend: Frontend) -> None:
    request = chat(tools=TOOLS, toolChoice={"mode": "MODE_REQUIRED"}, parallelToolCalls=False, stop={"maxTokens": 400})
    request.output.token_ids = True
    messages = stream(frontend, request)
    parts = [call for message in messages for call in message.delta.tool_calls]
    assert {call.index for call in parts} == {0}
    assert [call.id != "" for call in parts] == [True] + [False] * (len(parts) - 1)
    # The arguments stream as they are written.
    assert len(parts) + num_merged(messages) > 4
    _check_arguments(parts[0].name, "".join(call.arguments for call in parts))
    assert content(messages) == ""
    assert messages[-1].finished.reason == common_pb2.FINISH_REASON_TOOL_CALLS


def test_of_several_calls_each_is_valid(frontend: Frontend) -> None:
    request = chat(tools=TOOLS, toolChoice={"mode": "MODE_REQUIRED"}, stop={"maxTokens": 120})
    choice = frontend.chat.Chat(request, timeout=TIMEOUT_S).choices[0]
    calls = list(choice.message.tool_calls)
    # A small model calls on and on, and the last call may be cut off.
    for call in calls[:-1] if choice.reason == common_pb2.FINISH_REASON_LENGTH else calls:
        _check_arguments(call.name, call.arguments)
    assert len(calls) > 0


def test_a_named_function_is_called(frontend: Frontend) -> None:
    request = chat(tools=TOOLS, toolChoice={"functionName": "population"}, stop={"maxTokens": 200})
    choice = frontend.chat.Chat(request, timeout=TIMEOUT_S).choices[0]
    (call,) = choice.message.tool_calls
    assert call.name == "population"
    _check_arguments(call.name, call.arguments)
    assert (list(choice.message.content), choice.reason) == ([], common_pb2.FINISH_REASON_TOOL_CALLS)


GUIDED_CALLS = (
    r"[A-Z][a-z ,]{3,40}\.\n"
    r'(<tool_call>\n\{"name": "weather", "arguments": \{"city": "(Paris|London)", "celsius": (true|false)\}\}\n'
    r"</tool_call>\n?){1,2}"
)


def test_calls_among_text_that_a_grammar_makes_the_model_write(frontend: Frontend) -> None:
    guide = {"regex": GUIDED_CALLS}
    request = chat(tools=TOOLS, stop={"maxTokens": 200}, output={"tokenIds": True}, structuredOutput=guide)
    for name, arguments in _calls_as_the_parser_reads_them(frontend, request)[1]:
        assert name == "weather"
        _check_arguments(name, arguments)


def test_a_call_that_the_model_writes_by_itself_after_examples(frontend: Frontend) -> None:
    request = after_examples(TOOLS)
    text, calls = _calls_as_the_parser_reads_them(frontend, request)
    assert text == "I will look it up."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("weather", {"city": "Paris"})]


def test_a_strict_function_gets_arguments_of_its_schema_against_the_examples(frontend: Frontend) -> None:
    # The examples leave out `celsius`, which the schema requires.
    request = after_examples([{**tool, "strict": True} for tool in TOOLS])
    answer = frontend.chat.Chat(request, timeout=TIMEOUT_S).choices[0]
    (call,) = answer.message.tool_calls
    _check_arguments(call.name, call.arguments)
    assert (call.name, json.loads(call.arguments)["city"]) == ("weather", "Paris")
    assert answer.reason == common_pb2.FINISH_REASON_TOOL_CALLS
    parts = [part for message in stream(frontend, request) for part in message.delta.tool_calls]
    assert joined(parts) == [(call.name, call.arguments)]


@pytest.mark.parametrize("parser", EXAMPLES)
def test_a_strict_function_in_the_way_of_another_family(other_frontends: dict[str, Frontend], parser: str) -> None:
    request = after_examples([{**tool, "strict": True} for tool in TOOLS], EXAMPLES[parser])
    request.parallel_tool_calls = False
    answer = other_frontends[parser].chat.Chat(request, timeout=TIMEOUT_S).choices[0]
    (call,) = answer.message.tool_calls
    _check_arguments(call.name, call.arguments)
    assert (call.name, json.loads(call.arguments)["city"]) == ("weather", "Paris")
    assert answer.reason == common_pb2.FINISH_REASON_TOOL_CALLS


def after_examples(tools: list[dict[str, Any]], example: str = HERMES_EXAMPLE) -> ChatRequest:
    """A question after two that were answered with a call. `example`: an answer, with CITY for its city."""
    messages = [("SYSTEM", "You answer questions about the weather with a call of the function weather.")]
    for city in ("Rome", "London"):
        messages.append(("USER", f"What is the weather in {city}?"))
        messages.append(("ASSISTANT", example.replace("CITY", city)))
    messages.append(("USER", "What is the weather in Paris?"))
    conversation = [{"role": f"ROLE_{role}", "content": [{"text": text}]} for role, text in messages]
    return chat(messages=conversation, tools=tools, stop={"maxTokens": 90}, output={"tokenIds": True})


def _calls_as_the_parser_reads_them(frontend: Frontend, request: ChatRequest) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a chat, streamed and whole: what the parser makes of the text that Generate gives."""
    prompt = frontend.tokenization.RenderChat(RenderChatRequest(chat=request), timeout=TIMEOUT_S).token_ids
    raw = GenerateRequest(sampling=request.sampling, stop=request.stop, output=request.output)
    raw.token_ids.ids.extend(prompt)
    if request.HasField("structured_output"):
        raw.structured_output.CopyFrom(request.structured_output)
    generated = frontend.generation.Generate(raw, timeout=TIMEOUT_S).completions[0]
    assert generated.text.count("<tool_call>") > 0
    read = parsed(generated.text)

    messages = stream(frontend, request)
    assert token_ids(messages) == list(generated.token_ids)
    parts = [call for message in messages for call in message.delta.tool_calls]
    assert (content(messages), joined(parts)) == read
    assert len(parts) + num_merged(messages) > 4
    assert messages[-1].finished.reason == common_pb2.FINISH_REASON_TOOL_CALLS

    answer = frontend.chat.Chat(request, timeout=TIMEOUT_S).choices[0].message
    assert (answer.content[0].text, [(call.name, call.arguments) for call in answer.tool_calls]) == read
    return read


def parsed(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content, and name and arguments of each call, as the parser reads the text in one piece."""
    options = ParserOptions("hermes", None, reasoning_open=False, tool_call_id=lambda: "id")
    parser = output_parser(options)
    deltas = [*parser.feed(text), *parser.finish()]
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)), joined(calls)


def joined(parts: Sequence[Any]) -> list[tuple[str, str]]:
    """Fragments of calls put together: name and arguments of each, by index."""
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        name, arguments = calls.get(part.index, ("", ""))
        calls[part.index] = (name + part.name, arguments + part.arguments)
    return [calls[index] for index in sorted(calls)]


def _check_arguments(name: str, text: str) -> None:
    arguments = json.loads(text)
    assert arguments.pop("city") in CITY["enum"]
    assert [type(value) for value in arguments.values()] == ([bool] if name == "weather" else [])


def test_an_answer_that_was_begun_goes_on(frontend: Frontend) -> None:
    begun = {"role": "ROLE_ASSISTANT", "content": [{"text": "The capital of France is"}]}
    request = chat(messages=[QUESTION, begun], continueFinalMessage=True, stop={"maxTokens": 3})
    rendered = frontend.tokenization.RenderChat(RenderChatRequest(chat=request), timeout=TIMEOUT_S)
    assert rendered.text.endswith("<|im_start|>assistant\nThe capital of France is")
    assert frontend.chat.Chat(request, timeout=TIMEOUT_S).choices[0].message.content[0].text.startswith(" Paris")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_resumed_answer_is_the_uninterrupted_one(frontend: Frontend, temperature: float) -> None:
    request = chat(sampling={"temperature": temperature}, output={"tokenIds": True}, stop={"maxTokens": 24})
    whole = stream(frontend, request)
    request.sampling.seed = whole[0].accepted.seed
    # Behind the last of 24 tokens, which may be any delta's where tokens come together, there is nothing to resume.
    cuts = [cut for cut in (1, len(whole) // 2) if len(token_ids(whole[: cut + 1])) < request.stop.max_tokens]
    for cut in cuts:
        request.resume_output_token_ids.ids[:] = token_ids(whole[: cut + 1])
        rest = stream(frontend, request)
        assert content(whole[: cut + 1]) + content(rest) == content(whole)
        assert token_ids(whole[: cut + 1]) + token_ids(rest) == token_ids(whole)


def test_leaving_a_stream_frees_everything(stack: tuple[Service, Frontend]) -> None:
    engine, frontend = stack
    request = chat(stop={"maxTokens": 4000, "ignoreEos": True})
    call = frontend.chat.ChatStream(request, timeout=TIMEOUT_S)
    while not next(call).delta.content:
        pass
    call.cancel()
    for service, name in (
        (engine, "stepwire_engine_core_kv_cache_usage_ratio"),
        (engine, "stepwire_engine_core_requests_running"),
        (frontend, "stepwire_frontend_requests_in_flight"),
    ):
        wait_until_zero(service, name)
