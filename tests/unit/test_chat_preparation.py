"""From a ChatRequest to a text generation: its prompt, its grammar, the parsers, and what is refused by name."""

from __future__ import annotations

import json
import math

import pytest
from google.protobuf import json_format

from frontend.chat.enforced_calls import EnforcedCalls
from frontend.chat.model import ChatModel, ChatOptions
from frontend.chat.preparation import PreparedChat, in_terms_of_chat, prepare
from frontend.chat_template import ChatTemplate
from frontend.output_parsers.interface import ContentDelta, ParserOptions, ReasoningDelta
from stepwire.errors import FieldViolation, InvalidRequestError
from stepwire.v1.chat_service_pb2 import ChatRequest

TEMPLATE = ChatTemplate(
    "{{ greeting }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}{% if add_generation_prompt %}<go>{% endif %}",
    {},
)
MODEL = ChatModel(TEMPLATE, "hermes", "qwen3", allows_request_template=False)
SILENT = ChatModel(TEMPLATE, None, None, allows_request_template=True)
THINKING = ChatModel(ChatTemplate("<think>", {}), "hermes", "deepseek_r1", allows_request_template=False)
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
OTHER = ChatModel(TEMPLATE, "qwen3_coder", None, allows_request_template=False)
# Strings of a limited length are not enforced between the tags of that parser.
SHORT = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}}
UNENFORCED = {"name": "g", "parameters": SHORT, "strict": True}
REGEX = {"structuredOutput": {"regex": "a"}}
ASSISTANT = {"role": "ROLE_ASSISTANT", "content": [{"text": "So"}]}
CALLING = {**ASSISTANT, "toolCalls": [{"name": "f"}]}


def prepared(model: ChatModel = MODEL, /, **fields: object) -> PreparedChat:
    fields.setdefault("messages", [{"role": "ROLE_USER", "content": [{"text": "Hi"}]}])
    return prepare(json_format.ParseDict(fields, ChatRequest()), model)


def refusal(model: ChatModel = MODEL, /, **fields: object) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        prepared(model, **fields)
    return caught.value


def fields_of(error: InvalidRequestError) -> list[str]:
    return [violation.field for violation in error.violations]


def test_a_chat_becomes_a_generation_with_the_same_fields():
    shared = {
        "sampling": {"temperature": 0.5, "n": 2},
        "stop": {"maxTokens": 7, "stop": ["x"]},
        "output": {"logprobs": 3, "tokenIds": True},
        "structuredOutput": {"regex": "a+"},
        "kv": {"cacheSalt": "s"},
        "priority": 3,
        "queueTimeoutMs": 9,
        "resumeOutputTokenIds": {"ids": [1, 2]},
        "model": "m",
        "loraName": "l",
    }
    given = prepared(SILENT, **shared).request
    assert json_format.MessageToDict(given) == {**shared, "text": "<user>Hi<go>", "addSpecialTokens": False}


def test_without_tools_and_reasoning_there_is_no_parser():
    assert prepared(SILENT).new_parser() is None


def test_the_parser_is_the_one_of_the_model_and_knows_the_tools(monkeypatch):
    given: list[ParserOptions] = []
    monkeypatch.setattr("frontend.chat.preparation.output_parser", given.append)
    prepared(MODEL, tools=[TOOL]).new_parser()
    (options,) = given
    assert (options.tool_parser, options.reasoning_parser, options.reasoning_open) == ("hermes", "qwen3", False)
    assert [tool.name for tool in options.tools] == ["f"]
    assert options.tool_call_id() != options.tool_call_id()


@pytest.mark.parametrize("choice", [{"mode": "MODE_REQUIRED"}, {"functionName": "f"}])
@pytest.mark.parametrize("model", [MODEL, SILENT])
def test_calls_of_a_grammar_are_read_the_same_way_in_every_family(model: ChatModel, choice: dict[str, str]):
    assert isinstance(prepared(model, tools=[TOOL], toolChoice=choice).new_parser(), EnforcedCalls)


def test_the_tools_in_force_are_offered_to_the_template():
    both = [TOOL, {**TOOL, "name": "g"}]
    texts = [prepared(tools=both, **choice).request.text for choice in ({}, {"toolChoice": {"mode": "MODE_NONE"}})]
    assert [("2 tools" in text) for text in texts] == [True, False]
    assert "1 tools" in prepared(tools=both, toolChoice={"functionName": "g"}).request.text


@pytest.mark.parametrize(
    ("fields", "tool_parser", "kind"),
    [
        ({}, None, None),
        ({"tools": [TOOL]}, "hermes", None),
        ({"tools": [{**TOOL, "strict": True}]}, "hermes", "structural_tag"),
        ({"tools": [TOOL], "toolChoice": {"mode": "MODE_NONE"}}, None, None),
        ({"tools": [TOOL], "toolChoice": {"mode": "MODE_REQUIRED"}}, None, "json_schema"),
        ({"tools": [TOOL], "toolChoice": {"functionName": "f"}}, None, "json_schema"),
    ],
)
def test_parser_and_grammar_follow_the_choice(fields: dict[str, object], tool_parser: str | None, kind: str | None):
    chat = prepared(**fields)
    assert (chat.tool_parser, chat.request.structured_output.WhichOneof("spec")) == (tool_parser, kind)


def test_a_required_call_needs_no_parser_of_the_family():
    chat = prepared(SILENT, tools=[TOOL], toolChoice={"mode": "MODE_REQUIRED"}, parallelToolCalls=False)
    assert json.loads(chat.request.structured_output.json_schema)["maxItems"] == 1


@pytest.mark.parametrize(
    ("fields", "is_read"),
    [
        ({}, True),
        ({"tools": [{**TOOL, "strict": True}]}, True),
        ({"tools": [TOOL], "toolChoice": {"mode": "MODE_REQUIRED"}}, False),
        ({"structuredOutput": {"regex": "a+"}}, False),
        ({"messages": [ASSISTANT], "continueFinalMessage": True}, False),
    ],
)
def test_reasoning_is_read_where_there_can_be_some(fields: dict[str, object], is_read: bool):
    assert (prepared(**fields).reasoning_parser is not None) is is_read


def test_reasoning_that_the_template_opens():
    assert (prepared(THINKING).is_reasoning_open, prepared(MODEL).is_reasoning_open) == (True, False)


def test_the_reasoning_of_each_choice_is_found_apart_from_its_calls():
    chat = prepared(THINKING)
    first, second = chat.new_reasoning(), chat.new_reasoning()
    assert first is not None
    assert first is not second
    assert first.feed("a</think>b") == [ReasoningDelta("a"), ContentDelta("b")]
    assert prepared(SILENT).new_reasoning() is None


def test_template_variables_and_the_generation_prompt():
    assert prepared(chatTemplateKwargs={"greeting": "Hello! "}).request.text == "Hello! <user>Hi<go>"
    assert prepared(addGenerationPrompt=False).request.text == "<user>Hi"
    assert prepared(messages=[ASSISTANT], continueFinalMessage=True).request.text == "<assistant>So"


def test_a_callers_template_is_the_operators_choice():
    assert prepared(SILENT, chatTemplate="{{ messages[0].content }}!").request.text == "Hi!"
    error = refusal(MODEL, chatTemplate="x")
    assert (error.reason, fields_of(error)) == ("CHAT_TEMPLATE_NOT_ALLOWED", ["chat_template"])
    assert fields_of(refusal(SILENT, chatTemplate="x" * (256 * 1024 + 1))) == ["chat_template"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"chatTemplateKwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chatTemplateKwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"continueFinalMessage": True}, "continue_final_message"),
        ({"continueFinalMessage": True, "messages": [{"role": "ROLE_ASSISTANT"}]}, "continue_final_message"),
        ({"continueFinalMessage": True, "messages": [CALLING]}, "continue_final_message"),
        ({"continueFinalMessage": True, "messages": [ASSISTANT], "addGenerationPrompt": True}, "add_generation_prompt"),
        ({"tools": [TOOL], "toolChoice": {"functionName": "f"}, **REGEX}, "structured_output"),
        ({"tools": [{**TOOL, "strict": True}], **REGEX}, "structured_output"),
    ],
)
def test_contradictions_are_named(fields: dict[str, object], field: str):
    error = refusal(**fields)
    assert (error.reason, fields_of(error)) == ("FIELD_INVALID", [field])


@pytest.mark.parametrize(
    ("model", "fields", "field"),
    [
        (MODEL, {"output": {"echoPrompt": True}}, "output.echo_prompt"),
        (MODEL, {"output": {"promptLogprobs": 1}}, "output.prompt_logprobs"),
        (SILENT, {"tools": [TOOL]}, "tool_choice"),
        (OTHER, {"tools": [TOOL, UNENFORCED]}, "tools[1].strict"),
    ],
)
def test_what_cannot_be_done_is_unsupported(model: ChatModel, fields: dict[str, object], field: str):
    error = refusal(model, **fields)
    assert (error.reason, fields_of(error)) == ("UNSUPPORTED_FEATURE", [field])


def test_all_violations_are_told_at_once():
    error = refusal(messages=[{"role": "ROLE_USER"}], tools=[{"name": "?"}], toolChoice={})
    assert fields_of(error) == ["tools[0].name", "tool_choice.choice", "messages[0].content"]


def test_a_schema_that_is_nested_too_deeply():
    nested = '{"a":' * 700 + "{}" + "}" * 700
    error = refusal(tools=[{"name": "f", "parametersJson": nested}], toolChoice={"mode": "MODE_REQUIRED"})
    assert fields_of(error)[0].startswith("tools")


def test_violations_of_the_generation_have_the_names_of_the_chat():
    violations = tuple(FieldViolation(name, "bad") for name in ("text", "stop.stop", "structured_output.json_schema"))
    error = InvalidRequestError("x", reason="CONTEXT_LENGTH_EXCEEDED", violations=violations)
    strict = prepared(tools=[{**TOOL, "strict": True}])
    own, of_tools = in_terms_of_chat(error, prepared(tools=[TOOL])), in_terms_of_chat(error, strict)
    assert fields_of(own) == ["messages", "stop.stop", "structured_output.json_schema"]
    assert fields_of(of_tools) == ["messages", "stop.stop", "tools"]
    assert (own.reason, own.message.startswith("messages: bad; ")) == ("CONTEXT_LENGTH_EXCEEDED", True)


def test_parsers_are_those_of_the_family_or_of_the_operator(tmp_path, monkeypatch):
    monkeypatch.setattr("frontend.chat.model.families", lambda model_type, template: (model_type, template))
    (tmp_path / "chat_template.jinja").write_text("qwen3")
    (tmp_path / "config.json").write_text('{"model_type": "hermes"}')
    own = tmp_path / "own.jinja"
    own.write_text("mine")
    of_family = ChatModel.from_directory(tmp_path, ChatOptions())
    assert (of_family.tool_parser, of_family.reasoning_parser) == ("hermes", "qwen3")
    chosen = ChatModel.from_directory(tmp_path, ChatOptions(own, "mistral", "none"))
    assert (chosen.tool_parser, chosen.reasoning_parser, chosen.template.source) == ("mistral", None, "mine")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_json_does_not_have_are_refused_in_a_struct(number: float):
    message = {"role": "ROLE_USER", "content": [{"text": "Hi"}]}
    request = json_format.ParseDict({"messages": [message], "tools": [TOOL]}, ChatRequest())
    for struct in (request.chat_template_kwargs, request.tools[0].parameters):
        struct.fields["a"].list_value.values.add(number_value=number)
    with pytest.raises(InvalidRequestError) as caught:
        prepare(request, MODEL)
    assert fields_of(caught.value) == ["tools[0].parameters", "chat_template_kwargs"]
