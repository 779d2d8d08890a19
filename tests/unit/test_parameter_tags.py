"""Strict calls with a tag for each parameter: what passes the grammar is read as arguments of the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from engine_core.scheduler.grammar import GrammarSpec
from engine_core.structured_output.grammar_text import compile_spec
from frontend.chat.tool_grammar import refusal, structural_tag
from frontend.chat.tools import Tool
from frontend.output_parsers.choice import output_parser
from frontend.output_parsers.interface import ParserOptions, ToolCallDelta, ToolSchema

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "anything"},
        "kind": {"type": "string", "enum": ["a", "1", "true"]},
        "größe": {"type": "integer"},
        "either": {"type": ["string", "null"]},
        "node": {"$ref": "#/$defs/node"},
        "any": True,
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}, "name": {"type": "string"}},
            "additionalProperties": False,
        }
    },
}
ODD = '\n 5 "quoted"\\ </parameter </function> <function=f>\n'
TEXT = "<parameter=text>\nx\n</parameter>\n"


def tool(schema: dict[str, Any]) -> Tool:
    return Tool("f", "", {"type": "object", **schema}, is_strict=True)


def accepts(schema: dict[str, Any], parameters: str) -> bool:
    tokens = [bytes([byte]) for byte in range(256)]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=256, stop_token_ids=[])
    spec = GrammarSpec("structural_tag", structural_tag("qwen3_coder", [tool(schema)], is_parallel=True))
    compiled = compile_spec(xgrammar.GrammarCompiler(info, max_threads=1), spec)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return all(matcher.accept_token(byte) for byte in call(parameters).encode()) and matcher.is_completed()


def call(parameters: str) -> str:
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


def read(schema: dict[str, Any], parameters: str) -> Any:
    tools = (ToolSchema("f", schema),)
    options = ParserOptions("qwen3_coder", None, reasoning_open=False, tool_call_id=lambda: "id", tools=tools)
    parser = output_parser(options)
    deltas = [*parser.feed(call(parameters)), *parser.finish()]
    assert all(isinstance(delta, ToolCallDelta) for delta in deltas)
    return json.loads("".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta)))


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "", ""),
        ("text", ODD, ODD),
        ("kind", "1", "1"),
        ("kind", "true", "true"),
        ("größe", "12", 12),
        ("either", '"12"', "12"),
        ("either", "null", None),
        ("node", '{"next": {"next": {}, "name": "</function>"}}', {"next": {"next": {}, "name": "</function>"}}),
        ("any", '["é", 1.5, {"a": true}]', ["é", 1.5, {"a": True}]),
    ],
)
def test_a_value_passes_and_is_read(key: str, text: str, value: object) -> None:
    parameters = parameter(key, text) if key == "text" else TEXT + parameter(key, text)
    assert accepts(SCHEMA, parameters)
    assert read(SCHEMA, parameters)[key] == value


@pytest.mark.parametrize(
    "parameters",
    [
        parameter("kind", "a"),
        TEXT + parameter("kind", "b"),
        TEXT + parameter("kind", "\na"),
        TEXT + parameter("größe", "1.5"),
        TEXT + parameter("größe", '"12"'),
        TEXT + parameter("either", "12"),
        TEXT + parameter("either", "text"),
        TEXT + parameter("node", '{"next": 5}'),
        TEXT + parameter("any", '{"a": "</parameter>"}'),
        TEXT + parameter("other", "1"),
        TEXT + TEXT,
    ],
)
def test_a_value_that_breaks_the_schema_does_not_pass(parameters: str) -> None:
    assert not accepts(SCHEMA, parameters)


@pytest.mark.parametrize("schema", [{}, {"properties": {}}])
def test_a_function_without_parameters(schema: dict[str, Any]) -> None:
    assert accepts(schema, "")
    assert read(schema, "") == {}


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (SCHEMA, ""),
        ({"properties": {"pattern": {"type": "integer"}, "b": {"default": {"pattern": 1}}}}, ""),
        ({"anyOf": [{}]}, "anyOf is not supported"),
        ({"properties": {"a": {"type": "array", "items": {"type": "string", "maxLength": 5}}}}, "maxLength is not"),
        ({"properties": {"a": {"type": "string", "pattern": "a+"}}}, "pattern is not supported"),
        ({"properties": {"a": {"type": "string", "anyOf": []}}}, "anyOf is not supported for a string"),
        ({"properties": {"a": {"type": "string", "enum": [5]}}}, "a list of values without a string"),
        ({"properties": {"a b": {}}}, "a name of a property has other characters"),
        ({"properties": {}, "required": ["a"]}, "required and properties"),
        ({"properties": {}, "required": [{}]}, "required and properties"),
        ({"properties": []}, "required and properties"),
        ({"additionalProperties": {"type": "integer"}}, "a schema of additionalProperties"),
    ],
)
def test_what_cannot_be_enforced_is_told(schema: dict[str, Any], told: str) -> None:
    assert refusal("qwen3_coder", tool(schema)).startswith(told)
    assert (refusal("qwen3_coder", tool(schema)) == "") is (told == "")
    assert refusal("hermes", tool(schema)) == ""
