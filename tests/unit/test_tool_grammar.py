"""Grammars of tool calls: what xgrammar makes of them accepts good calls and nothing else."""

from __future__ import annotations

import json

import pytest
import xgrammar

from engine_core.scheduler.grammar import GrammarSpec
from engine_core.structured_output.grammar_text import GrammarError, compile_spec
from frontend.chat.call_families import FAMILIES
from frontend.chat.tool_grammar import arguments_schema, array_schema, structural_tag
from frontend.chat.tools import Tool
from frontend.output_parsers.choice import TOOL_PARSERS

NODE = {
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/value"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["value", "next"],
    "$defs": {"value": {"type": "integer"}},
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("weather", "", CITY, is_strict=True)
LIST = Tool("list", "", NODE, is_strict=False)
TOOLS = (WEATHER, LIST)


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    tokens = [bytes([byte]) for byte in range(256)]
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=256, stop_token_ids=[]), max_threads=1
    )


def accepts(compiler: xgrammar.GrammarCompiler, kind: str, grammar: str, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(
        compile_spec(compiler, GrammarSpec(kind, grammar)), terminate_without_stop_token=True
    )
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_completed()


def call(name: str, parameters: object) -> dict[str, object]:
    return {"name": name, "parameters": parameters}


PARIS = call("weather", {"city": "Paris"})
CHAIN = call("list", {"value": 1, "next": {"value": 2, "next": None}})


@pytest.mark.parametrize(
    ("calls", "is_good"),
    [
        ([PARIS], True),
        ([CHAIN, PARIS], True),
        ([], False),
        ([call("weather", {"city": 5})], False),
        ([call("weather", {})], False),
        ([call("list", {"value": "x", "next": None})], False),
        ([call("list", {"value": 1, "next": {"value": 2}})], False),
        ([call("other", {})], False),
        ([{**PARIS, "more": 1}], False),
        (PARIS, False),
    ],
)
def test_required_calls(compiler, calls: object, is_good: bool):
    assert accepts(compiler, "json_schema", array_schema(TOOLS, is_parallel=True), json.dumps(calls)) is is_good


def test_one_call_at_most(compiler):
    schema = array_schema(TOOLS, is_parallel=False)
    assert accepts(compiler, "json_schema", schema, json.dumps([PARIS]))
    assert not accepts(compiler, "json_schema", schema, json.dumps([PARIS, PARIS]))


@pytest.mark.parametrize(("arguments", "is_good"), [({"city": "Paris"}, True), ({"city": 1}, False), ([], False)])
def test_a_named_functions_arguments(compiler, arguments: object, is_good: bool):
    assert accepts(compiler, "json_schema", arguments_schema(WEATHER), json.dumps(arguments)) is is_good


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("Just text, {with} braces and <tags>.", True),
        ("Well: " + tagged("weather", '{"city": "Paris"}'), True),
        (tagged("weather", '{"city": "Paris"}') + "\n" + tagged("list", '{"anything": [1]}'), True),
        (tagged("weather", '{"city": 7}'), False),
        (tagged("other", "{}"), False),
    ],
)
def test_strict_calls_among_text(compiler, text: str, is_good: bool):
    grammar = structural_tag("hermes", TOOLS, is_parallel=True)
    assert accepts(compiler, "structural_tag", grammar, text) is is_good


def test_one_strict_call_at_most(compiler):
    grammar, one = structural_tag("hermes", TOOLS, is_parallel=False), tagged("weather", '{"city": "Paris"}')
    assert accepts(compiler, "structural_tag", grammar, "So: " + one)
    assert not accepts(compiler, "structural_tag", grammar, one + one)


def test_a_strict_schema_that_cannot_be_enforced_is_refused(compiler):
    tool = Tool("f", "", {"type": "object", "not": {}}, is_strict=True)
    with pytest.raises(GrammarError, match="not is not supported"):
        compile_spec(compiler, GrammarSpec("structural_tag", structural_tag("hermes", [tool], is_parallel=True)))


def test_every_parser_of_a_family_has_a_shape_to_enforce():
    assert set(FAMILIES) == set(TOOL_PARSERS)
