"""Tools and tool choice: which are in force, how a template sees them, what is refused by name."""

from __future__ import annotations

import json

import pytest
from google.protobuf import json_format

from frontend.chat import tools
from frontend.chat.tools import MAX_SCHEMA_CHARS, MAX_TOOLS, ToolMode, ToolPlan, read_tools
from frontend.input_processor.field_checks import FieldChecks
from stepwire.errors import InvalidRequestError
from stepwire.v1.chat_service_pb2 import ChatRequest

ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
NOW = {"name": "now"}


def plan(**fields: object) -> ToolPlan:
    checks = FieldChecks()
    result = read_tools(json_format.ParseDict(fields, ChatRequest()), checks)
    checks.raise_if_any()
    return result


def names(given: ToolPlan) -> list[str]:
    return [tool.name for tool in given.tools]


@pytest.mark.parametrize(
    ("choice", "mode", "in_force"),
    [
        (None, ToolMode.AUTO, ["add", "now"]),
        ({"mode": "MODE_AUTO"}, ToolMode.AUTO, ["add", "now"]),
        ({"mode": "MODE_NONE"}, ToolMode.NONE, []),
        ({"mode": "MODE_REQUIRED"}, ToolMode.REQUIRED, ["add", "now"]),
        ({"functionName": "now"}, ToolMode.NAMED, ["now"]),
    ],
)
def test_the_choice_decides_which_tools_are_in_force(choice: object, mode: ToolMode, in_force: list[str]):
    fields = {"tools": [ADD, NOW], **({"toolChoice": choice} if choice else {})}
    assert (plan(**fields).mode, names(plan(**fields))) == (mode, in_force)


@pytest.mark.parametrize("choice", [None, {"mode": "MODE_AUTO"}, {"mode": "MODE_NONE"}])
def test_without_tools_there_is_no_choice(choice: object):
    assert plan(**({"toolChoice": choice} if choice else {})) == ToolPlan()


def test_calls_are_parallel_unless_the_caller_says_no():
    assert [plan(tools=[NOW], **extra).is_parallel for extra in ({}, {"parallelToolCalls": False})] == [True, False]


def test_what_a_template_sees_of_a_tool():
    add, now = plan(tools=[ADD, NOW]).tools
    assert add.for_template() == {"type": "function", "function": ADD}
    assert now.for_template()["function"] == {"name": "now", "parameters": {"type": "object", "properties": {}}}


def test_a_schema_of_a_struct_has_integers_and_one_order_of_its_keys():
    schema = {"type": "object", "properties": {"b": {"type": "array", "minItems": 2}, "a": {"minimum": 0.5}}}
    (tool,) = plan(tools=[{"name": "f", "parameters": schema}]).tools
    assert json.dumps(tool.parameters["properties"]) == (
        '{"a": {"minimum": 0.5}, "b": {"minItems": 2, "type": "array"}}'
    )


def test_a_schema_of_text_keeps_its_order():
    text = '{"type": "object", "properties": {"b": {}, "a": {}}}'
    (tool,) = plan(tools=[{"name": "f", "parametersJson": text}]).tools
    assert json.dumps(tool.parameters) == text


def test_schemas_are_measured_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch):
    parsed: list[str] = []
    monkeypatch.setattr(tools, "_parse", parsed.append)
    half = json.dumps({"title": "x" * (MAX_SCHEMA_CHARS // 2)})
    with pytest.raises(InvalidRequestError, match=f"tools: .* at most {MAX_SCHEMA_CHARS}"):
        plan(tools=[{"name": name, "parametersJson": half} for name in ("f", "g")])
    assert parsed == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [NOW, {"name": "a b"}]}, "tools[1].name"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [{"name": "x" * 65}]}, "tools[0].name"),
        ({"tools": [NOW, NOW]}, "tools[1].name"),
        ({"tools": [{"name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tools": [{"name": "f", "parametersJson": "{"}]}, "tools[0].parameters_json"),
        ({"tools": [{"name": "f", "parametersJson": "[]"}]}, "tools[0].parameters_json"),
        ({"tools": [{"name": "f", "parametersJson": '{"minimum": NaN}'}]}, "tools[0].parameters_json"),
        ({"tools": [{"name": "f", "parametersJson": "[" * 9999}]}, "tools[0].parameters_json"),
        ({"tools": [{**ADD, "parametersJson": "{}"}]}, "tools[0].parameters_json"),
        ({"tools": [{"name": f"f{index}"} for index in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [{"name": "f", "parameters": {"title": "x" * MAX_SCHEMA_CHARS}}]}, "tools"),
        ({"tools": [NOW], "toolChoice": {}}, "tool_choice.choice"),
        ({"tools": [NOW], "toolChoice": {"mode": "MODE_UNSPECIFIED"}}, "tool_choice.mode"),
        ({"tools": [NOW], "toolChoice": {"mode": 99}}, "tool_choice.mode"),
        ({"toolChoice": {"mode": "MODE_REQUIRED"}}, "tool_choice.mode"),
        ({"tools": [NOW], "toolChoice": {"functionName": "then"}}, "tool_choice.function_name"),
        ({"toolChoice": {"functionName": "now"}}, "tool_choice.function_name"),
    ],
)
def test_wrong_tools_are_named(fields: dict[str, object], field: str):
    with pytest.raises(InvalidRequestError) as caught:
        plan(**fields)
    assert [violation.field for violation in caught.value.violations] == [field]
