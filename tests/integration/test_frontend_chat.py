"""ChatService through a real frontend and a fake engine, which echoes the prompt: what a caller sees."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format

from fakes.fake_engine import FakeEngine
from fakes.fake_output_parser import FakeOutputParser
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from frontend.output_parsers.choice import output_parser
from running_frontend import SERVING, RunningFrontend, failure_of, running_frontend
from stepwire import tokenizer_archive
from stepwire.v1 import common_pb2, generation_service_pb2, model_service_pb2
from stepwire.v1.chat_service_pb2 import ChatRequest, ChatStreamResponse
from stepwire.v1.tokenization_service_pb2 import GetTokenizerRequest, RenderChatRequest

# The echo begins with what the last user said, and ends at the stop string.
TEMPLATE = "{{ messages[-1].content }}"
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return write_model_dir(directory, byte_level_backend(), config={"eos_token_id": 0})


@pytest.fixture
async def engine(tokenizer_dir: Path) -> AsyncIterator[FakeEngine]:
    fake = FakeEngine(tokenizer_dir, vocab_size=400)
    fake.ready.structured_output_kinds.extend(["json_schema", "structural_tag"])
    async with fake.running():
        yield fake


@pytest.fixture
async def frontend(engine: FakeEngine, tmp_path: Path, monkeypatch) -> AsyncIterator[RunningFrontend]:
    monkeypatch.setattr("frontend.chat.preparation.output_parser", lambda options: FakeOutputParser())
    monkeypatch.setattr("frontend.chat.model.families", lambda model_type, template: ("hermes", "qwen3"))
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache") as running:
        await running.wait_for_health(SERVING)
        yield running


def chat(text: str, **fields: object) -> ChatRequest:
    """A greedy request that ends at STOP."""
    return json_format.ParseDict(
        {
            "messages": [{"role": "ROLE_USER", "content": [{"text": text}]}],
            "sampling": {"temperature": 0},
            "stop": {"maxTokens": 60, "stop": ["STOP"]},
            **fields,
        },
        ChatRequest(),
    )


async def stream(frontend: RunningFrontend, request: ChatRequest) -> list[ChatStreamResponse]:
    return [message async for message in frontend.chat.ChatStream(request)]


def whole(messages: list[ChatStreamResponse], choice: int = 0) -> tuple[str, str, dict[int, tuple[str, str, str]]]:
    """Content, reasoning and calls of the deltas."""
    deltas = [message.delta for message in messages if message.delta.choice == choice]
    calls: dict[int, tuple[str, str, str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        call_id, name, arguments = calls.get(call.index, ("", "", ""))
        calls[call.index] = (call_id + call.id, name + call.name, arguments + call.arguments)
    return "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas), calls


async def test_a_stream_is_accepted_then_deltas_then_finished(frontend: RunningFrontend):
    request = chat("~hm~hello@add:{1};@now:;!STOP", tools=[TOOL], requestId="c1", output={"timings": True})
    messages = await stream(frontend, request)
    kinds = [message.WhichOneof("event") for message in messages]
    assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("accepted", "finished", {"delta"})
    assert [message.index for message in messages] == list(range(len(messages)))
    accepted, finished = messages[0].accepted, messages[-1].finished
    assert (accepted.request_id, accepted.model, accepted.engine_id) == ("c1", "fake-model", "fake-0")
    assert whole(messages) == ("hello!", "hm", {0: ("id0", "add", "{1}"), 1: ("id1", "now", "")})
    assert finished.reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert finished.stop_match.stop_string == "STOP"
    assert finished.usage.prompt_tokens == accepted.prompt_tokens
    assert 0 < finished.usage.reasoning_tokens < finished.usage.completion_tokens
    assert finished.timings.engine_id == "fake-0"


async def test_unary_gives_the_whole_message(frontend: RunningFrontend):
    call = frontend.chat.Chat(chat("~hm~hello@add:{1};@now:;!STOP", tools=[TOOL], output={"tokenIds": True}))
    answer = await call
    (choice,) = answer.choices
    message = json_format.MessageToDict(choice.message)
    assert message == {
        "role": "ROLE_ASSISTANT",
        "content": [{"text": "hello!"}],
        "reasoning": "hm",
        "toolCalls": [{"id": "id0", "name": "add", "arguments": "{1}"}, {"id": "id1", "index": 1, "name": "now"}],
    }
    assert choice.reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert len(choice.token_ids) > 0
    assert answer.usage.completion_tokens > 0
    headers = dict(await call.initial_metadata())
    assert headers["x-request-id"] == answer.request_id


@pytest.mark.parametrize("tokens_per_step", [1, 100])
async def test_a_stop_string_counts_in_content_only(
    engine: FakeEngine, frontend: RunningFrontend, monkeypatch, tokens_per_step: int
):
    monkeypatch.setattr("frontend.chat.preparation.output_parser", output_parser)
    engine.tokens_per_step = tokens_per_step
    messages = await stream(frontend, chat("<think>a STOP b</think>c STOP d", sampling={"n": 2, "temperature": 1}))
    assert [whole(messages, choice) for choice in range(2)] == [("c ", "a STOP b", {})] * 2
    ends = [message.finished for message in messages if message.HasField("finished")]
    assert [end.stop_match.stop_string for end in ends] == ["STOP", "STOP"]


async def test_several_choices_are_told_apart_each_with_a_parser_of_its_own(frontend: RunningFrontend):
    request = chat("~a~b@add:1;STOP", tools=[TOOL], sampling={"temperature": 1, "n": 3})
    messages = await stream(frontend, request)
    assert [whole(messages, choice) for choice in range(3)] == [("b", "a", {0: ("id0", "add", "1")})] * 3
    finished = [message.finished for message in messages if message.WhichOneof("event") == "finished"]
    assert [one.HasField("usage") for one in finished] == [False, False, True]


async def test_an_answer_cut_short_is_no_call(frontend: RunningFrontend):
    messages = await stream(frontend, chat("@add:{123456789", tools=[TOOL], stop={"maxTokens": 9}))
    assert messages[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_parser_that_fails_ends_its_own_request_alone(frontend: RunningFrontend, monkeypatch):
    feed = FakeOutputParser.feed

    def failing(self: FakeOutputParser, text: str):
        if "!" in text:
            raise RuntimeError("of the parser")
        return feed(self, text)

    monkeypatch.setattr(FakeOutputParser, "feed", failing)
    failure = await failure_of(frontend.chat.Chat(chat("hello!STOP", tools=[TOOL])))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "OUTPUT_PROCESSING")
    assert "of the parser" not in failure.message
    assert whole(await stream(frontend, chat("helloSTOP", tools=[TOOL])))[0] == "hello"
    assert frontend.metric("output_processing_errors_total", stage="parser") == 1
    assert frontend.metric("requests_in_flight", client_class="other") == 0


async def test_a_required_call_has_a_grammar_in_the_engine(engine: FakeEngine, frontend: RunningFrontend):
    await stream(frontend, chat("helloSTOP", tools=[TOOL], toolChoice={"mode": "MODE_REQUIRED"}))
    await stream(frontend, chat("helloSTOP", tools=[TOOL], toolChoice={"functionName": "add"}))
    await stream(frontend, chat("helloSTOP", tools=[{**TOOL, "strict": True}]))
    required, named, strict = (add.structured_output for add in engine.adds)
    assert json.loads(required.json_schema)["items"]["anyOf"][0]["properties"]["name"] == {"const": "add"}
    assert json.loads(named.json_schema) == TOOL["parameters"]
    assert json.loads(strict.structural_tag)["type"] == "structural_tag"


async def test_resuming_goes_on_inside_a_call(frontend: RunningFrontend):
    text = "~hm~hello@add:{1234};STOP"
    full = await stream(frontend, chat(text, tools=[TOOL], output={"tokenIds": True}))
    deltas = [message.delta for message in full if message.WhichOneof("event") == "delta"]
    for cut in range(1, len(deltas)):
        ids = [token_id for delta in deltas[:cut] for token_id in delta.token_ids]
        request = chat(text, tools=[TOOL], output={"tokenIds": True}, resumeOutputTokenIds={"ids": ids})
        rest = [message.delta for message in await stream(frontend, request) if message.WhichOneof("event") == "delta"]
        for name in ("content", "reasoning"):
            assert "".join(getattr(delta, name) for delta in [*deltas[:cut], *rest]) == "".join(
                getattr(delta, name) for delta in deltas
            )
        arguments = [call.arguments for delta in [*deltas[:cut], *rest] for call in delta.tool_calls]
        assert "".join(arguments) == "{1234}"


async def test_a_load_report_comes_with_the_end(frontend: RunningFrontend):
    metadata = (("endpoint-load-metrics-format", "text"),)
    streamed = frontend.chat.ChatStream(chat("hi"), metadata=metadata)
    assert [message async for message in streamed]
    whole = frontend.chat.Chat(chat("hi"), metadata=metadata)
    await whole
    for call in (streamed, whole):
        trailers = dict(await call.trailing_metadata())
        assert trailers["endpoint-load-metrics"].startswith("TEXT application_utilization=")


async def test_leaving_a_stream_aborts_it(engine: FakeEngine, frontend: RunningFrontend):
    call = frontend.chat.ChatStream(chat("hello world", stop={"maxTokens": 2000}))
    await anext(aiter(call))
    call.cancel()
    await frontend.wait_idle()
    await engine.wait_until(lambda: engine.num_live == 0)
    assert frontend.maps == (0, 0)


async def test_abort_ends_a_chat_by_its_id(engine: FakeEngine, frontend: RunningFrontend):
    engine.may_step.clear()
    call = frontend.chat.ChatStream(chat("hello", requestId="c1"))
    messages = aiter(call)
    await anext(messages)
    await frontend.generation.Abort(generation_service_pb2.AbortRequest(request_ids=["c1"]))
    (finished,) = [message.finished async for message in messages]
    assert finished.reason == common_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize(
    ("fields", "code", "reason", "field"),
    [
        ({"messages": []}, "INVALID_ARGUMENT", "FIELD_INVALID", "messages"),
        ({"tools": [{"name": "?"}]}, "INVALID_ARGUMENT", "FIELD_INVALID", "tools[0].name"),
        ({"sampling": {"temperature": 9}}, "INVALID_ARGUMENT", "FIELD_INVALID", "sampling.temperature"),
        ({"model": "other"}, "NOT_FOUND", "MODEL_NOT_FOUND", "model"),
        ({"chatTemplate": "x"}, "PERMISSION_DENIED", "CHAT_TEMPLATE_NOT_ALLOWED", "chat_template"),
        ({"output": {"echoPrompt": True}}, "UNIMPLEMENTED", "UNSUPPORTED_FEATURE", "output.echo_prompt"),
        ({"loraName": "l"}, "UNIMPLEMENTED", "UNSUPPORTED_FEATURE", "lora_name"),
        ({"structuredOutput": {"regex": "a"}}, "UNIMPLEMENTED", "UNSUPPORTED_FEATURE", "structured_output.regex"),
    ],
)
async def test_errors_have_a_code_a_reason_and_the_field(
    frontend: RunningFrontend, fields: dict[str, object], code: str, reason: str, field: str
):
    for call in (frontend.chat.Chat(chat("x", **fields)), stream(frontend, chat("x", **fields))):
        failure = await failure_of(call)
        assert (failure.code.name, failure.reason, failure.fields) == (code, reason, [field])
    assert frontend.maps == (0, 0)


async def test_a_conversation_that_does_not_fit_names_the_messages(frontend: RunningFrontend):
    failure = await failure_of(frontend.chat.Chat(chat("hello " * 5000)))
    assert (failure.reason, failure.fields) == ("CONTEXT_LENGTH_EXCEEDED", ["messages"])


@pytest.mark.parametrize(("choice", "fields"), [({"mode": "MODE_REQUIRED"}, ["tools"]), ({"mode": "MODE_AUTO"}, [])])
async def test_a_grammar_made_of_the_tools_that_does_not_compile(
    engine: FakeEngine, frontend: RunningFrontend, choice: dict[str, str], fields: list[str]
):
    error = common_pb2.EngineError(reason="GRAMMAR_INVALID", message="json_schema does not compile", grpc_code=3)
    engine.reject = lambda request: error
    failure = await failure_of(frontend.chat.Chat(chat("x", tools=[TOOL], toolChoice=choice)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "GRAMMAR_INVALID")
    assert failure.fields == fields


async def test_an_id_in_flight_is_refused(engine: FakeEngine, frontend: RunningFrontend):
    engine.may_step.clear()
    call = frontend.chat.ChatStream(chat("hello", requestId="c1"))
    await anext(aiter(call))
    failure = await failure_of(frontend.chat.Chat(chat("hello", requestId="c1")))
    assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")


async def test_render_chat_is_what_the_engine_gets(engine: FakeEngine, frontend: RunningFrontend):
    request = chat("hello world", stop={"maxTokens": 1})
    rendered = await frontend.tokenization.RenderChat(RenderChatRequest(chat=request))
    await stream(frontend, request)
    assert rendered.text == "hello world"
    assert bytes(engine.adds[0].prompt_token_ids) == b"".join(
        token_id.to_bytes(4, "little") for token_id in rendered.token_ids
    )


async def test_render_chat_names_its_fields(frontend: RunningFrontend):
    request = RenderChatRequest(chat=chat("x", messages=[{"content": [{"text": "x"}]}]))
    failure = await failure_of(frontend.tokenization.RenderChat(request))
    assert failure.fields == ["chat.messages[0].role"]


async def test_get_tokenizer_gives_the_files_of_the_engine(engine: FakeEngine, frontend: RunningFrontend):
    pieces = [piece async for piece in frontend.tokenization.GetTokenizer(GetTokenizerRequest())]
    data = b"".join(piece.data for piece in pieces)
    assert data == engine.archive
    assert [piece.sha256 for piece in pieces] == [""] * (len(pieces) - 1) + [tokenizer_archive.sha256(data)]
    model = (await frontend.models.GetModel(model_service_pb2.GetModelRequest())).model
    assert model.tokenizer_sha256 == pieces[-1].sha256
    failure = await failure_of(_drain(frontend.tokenization.GetTokenizer(GetTokenizerRequest(model="other"))))
    assert failure.reason == "MODEL_NOT_FOUND"


async def _drain(call) -> None:
    async for _ in call:
        pass


async def test_capabilities_are_what_a_request_may_ask_for(frontend: RunningFrontend):
    (model,) = (await frontend.models.ListModels(model_service_pb2.ListModelsRequest())).models
    able = model.capabilities
    assert (able.chat, able.tools, able.tool_parser, able.reasoning_parser) == (True, True, "hermes", "qwen3")


async def test_a_model_without_a_template_has_no_chat(tokenizer_dir: Path, tmp_path: Path):
    (tokenizer_dir / "chat_template.jinja").unlink()
    async with (
        FakeEngine(tokenizer_dir, vocab_size=400).running() as engine,
        running_frontend(engine.endpoint, cache_dir=tmp_path / "other") as frontend,
    ):
        await frontend.wait_for_health(SERVING)
        (model,) = (await frontend.models.ListModels(model_service_pb2.ListModelsRequest())).models
        assert (model.capabilities.chat, model.capabilities.tools) == (False, False)
        failure = await failure_of(frontend.chat.Chat(chat("hello")))
        assert failure.fields == ["chat_template"]


async def test_the_operators_template_and_leave_for_those_of_callers(engine: FakeEngine, tmp_path: Path):
    file = tmp_path / "own.jinja"
    file.write_text("world{{ messages[0].content }}")
    settings = {"chat_template": str(file), "allow_request_chat_template": True}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache", **settings) as frontend:
        await frontend.wait_for_health(SERVING)
        texts = []
        for template in ("", "{{ messages[0].content }}{{ more }}"):
            request = chat("hello", chatTemplate=template, chatTemplateKwargs={"more": 5})
            texts.append((await frontend.tokenization.RenderChat(RenderChatRequest(chat=request))).text)
        assert texts == ["worldhello", "hello5"]


async def test_text_and_template_of_a_caller_are_in_no_error_and_no_log(engine, tmp_path, caplog):
    async with running_frontend(
        engine.endpoint, cache_dir=tmp_path / "cache", allow_request_chat_template=True
    ) as frontend:
        await frontend.wait_for_health(SERVING)
        for template in ("{{ raise_exception(messages[0].content) }}", "{% canary %}", "{{ canary.x.y }}"):
            failure = await failure_of(frontend.chat.Chat(chat("canary", chatTemplate=template)))
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
            assert "canary" not in failure.message + str(failure.bad_request)
    assert "canary" not in caplog.text
