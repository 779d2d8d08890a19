"""Strict calls among text, family by family: the grammar against the parser that reads what it lets pass."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import xgrammar

from engine_core.scheduler.grammar import GrammarSpec
from engine_core.structured_output.backends import Backends
from engine_core.structured_output.grammar_text import compile_spec
from engine_core.structured_output.vocabulary import Vocabulary
from frontend.chat.call_families import FAMILIES
from frontend.chat.tool_grammar import structural_tag
from frontend.chat.tools import Tool
from frontend.output_parsers.choice import output_parser
from frontend.output_parsers.interface import ParserOptions, ToolCallDelta, ToolSchema

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool("weather", "", CITY, is_strict=True), Tool("list", "", {"type": "object"}, is_strict=False))
MARKS = [*dict.fromkeys(name for family in FAMILIES.values() for name in family.special_tokens)]
VOCABULARY = Vocabulary(
    (*(bytes([byte]) for byte in range(256)), *(b"" for _ in MARKS)),
    {name: index for index, name in enumerate(MARKS, start=256)},
)
PARIS, NUMBER, ANYTHING = '{"city": "Paris"}', '{"city": 5}', '{"a": [1]}'
Accepts = Callable[..., bool]


@pytest.fixture(scope="module")
def accepts() -> Accepts:
    """Whether a parser's grammar takes a text, byte by byte or with its marks as the special tokens they are."""
    backends = Backends(VOCABULARY)
    compiled: dict[tuple[str, bool], xgrammar.CompiledGrammar] = {}

    def accepts(parser: str, text: str, *, is_parallel: bool = True, has_special_tokens: bool = False) -> bool:
        if (parser, is_parallel) not in compiled:
            spec = GrammarSpec("structural_tag", structural_tag(parser, TOOLS, is_parallel=is_parallel))
            compiled[parser, is_parallel] = compile_spec(backends.backend_for(spec), spec)
        matcher = xgrammar.GrammarMatcher(compiled[parser, is_parallel], terminate_without_stop_token=True)
        return all(map(matcher.accept_token, token_ids(text, has_special_tokens))) and matcher.is_completed()

    return accepts


def token_ids(text: str, has_special_tokens: bool) -> list[int]:
    if not has_special_tokens:
        return list(text.encode())
    for name, token_id in VOCABULARY.special_token_ids.items():
        text = text.replace(name, chr(0xE000 + token_id))
    return [
        token_id
        for char in text
        for token_id in ([ord(char) - 0xE000] if 0xE100 <= ord(char) < 0xE200 else char.encode())
    ]


def calls(parser: str, text: str) -> list[tuple[str, str]]:
    """Name and arguments of the calls that the parser finds."""
    tools = tuple(ToolSchema(tool.name, tool.parameters) for tool in TOOLS)
    reader = output_parser(ParserOptions(parser, None, reasoning_open=False, tool_call_id=lambda: "id", tools=tools))
    found: dict[int, tuple[str, str]] = {}
    for delta in [*reader.feed(text), *reader.finish()]:
        if isinstance(delta, ToolCallDelta):
            name, arguments = found.get(delta.index, ("", ""))
            found[delta.index] = (name + delta.name, arguments + delta.arguments)
    return list(found.values())


def item(name: str = "weather", arguments: str = PARIS, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def llama(name: str = "weather", arguments: str = PARIS) -> str:
    return item(name, arguments, "parameters")


def coder(name: str = "weather", parameters: str = "<parameter=city>\nParis\n</parameter>\n") -> str:
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


# What a family may write, and which calls that is.
GOOD = {
    "hermes": [(f"Well: <tool_call>\n{item()}\n</tool_call>", 1), ("<tool", 0)],
    "mistral": [
        ("", 0),
        ("Text with [brackets], {braces} and [TOOL.", 0),
        (f"[TOOL_CALLS][{item()}]", 1),
        (f"Let me see. [TOOL_CALLS] [{item()}, {item('list', ANYTHING)}] Done.", 2),
        (f"[TOOL_CALLS]weather{PARIS}", 1),
        (f"Well: [TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]list[ARGS]{{}}", 2),
        (f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}", 1),
    ],
    "llama3_json": [
        ("", 0),
        ("é text with {braces}, 1 < 2, <b>, and {} at its end: {}", 0),
        ("< 5", 0),
        (llama(), 1),
        (f"\n\n{llama()}; {llama('list', '{}')}", 2),
        (f"<|python_tag|>{llama()}", 1),
        (f"Let me see.<|python_tag|>{llama()}; {llama()}", 2),
    ],
    "qwen3_coder": [
        ("Text with <tags>, <tool_call> and <function.", 0),
        (coder(), 1),
        (f"Let me see.\n{coder()}\n{coder('list', '<parameter=a>[1]</parameter>')}\nDone.", 2),
        (coder("list", ""), 1),
    ],
}
# What the parser takes for a call that breaks the schema, or for one in a shape that was not foreseen.
BAD = {
    "hermes": [f"<tool_call>{item(arguments='{}')}</tool_call>"],
    "mistral": [
        f"[TOOL_CALLS][{item(arguments='{}')}]",
        f"[TOOL_CALLS][{item()}, {item(arguments=NUMBER)}]",
        f"[TOOL_CALLS][{item('other')}]",
        "[TOOL_CALLS]weather{}",
        "[TOOL_CALLS]weather[ARGS]{}",
        "[TOOL_CALLS]other[ARGS]{}",
        "[TOOL_CALLS]\n\nweather{}",
        '[TOOL_CALLS][{"arguments": {}, "name": "weather"}]',
    ],
    "llama3_json": [
        llama(arguments="{}"),
        f"{llama()}; {llama(arguments='{}')}",
        f"{llama()}, {llama(arguments='{}')}",
        f"{llama()} {llama(arguments='{}')}",
        item(arguments="{}"),
        '{ "name": "weather", "parameters": {}}',
        '{"n\\u0061me": "weather", "parameters": {}}',
        '{"type": "function", "name": "weather", "parameters": {}}',
        '{"parameters": {}, "name": "weather"}',
        f"\u00a0\t{llama(arguments='{}')}",
        f"\u3000{llama(arguments='{}')}",
        f"\x1c{llama(arguments='{}')}",
        f"<|python_tag|>{llama(arguments='{}')}",
        f"<|eot_id|>{llama(arguments='{}')}",
        f"Hello.<|eom_id|>{llama(arguments='{}')}",
        f"Hello.<|python_tag|>{llama(arguments='{}')}",
        f"<<|python_tag|>{llama(arguments='{}')}",
    ],
    "qwen3_coder": [
        coder(parameters=""),
        coder(parameters="<parameter=town>\nParis\n</parameter>\n"),
        coder("other"),
        coder(" weather", ""),
        "<function=weather></function>",
        coder("list", "?<function=weather>"),
        "<tool_call><tool_call>\n<function=weather>\n</function>\n</tool_call>",
    ],
}


@pytest.mark.parametrize("has_special_tokens", [False, True])
@pytest.mark.parametrize(("parser", "text", "count"), [(name, *good) for name in GOOD for good in GOOD[name]])
def test_what_a_family_writes_passes_and_is_read(
    accepts: Accepts, parser: str, text: str, count: int, has_special_tokens: bool
) -> None:
    assert accepts(parser, text, has_special_tokens=has_special_tokens)
    assert accepts(parser, text, is_parallel=False) is (count < 2)
    found = calls(parser, text)
    assert len(found) == count
    assert all(json.loads(arguments) == {"city": "Paris"} for name, arguments in found if name == "weather")


@pytest.mark.parametrize("has_special_tokens", [False, True])
@pytest.mark.parametrize(("parser", "text"), [(name, text) for name in BAD for text in BAD[name]])
def test_what_is_read_as_any_other_call_does_not_pass(
    accepts: Accepts, parser: str, text: str, has_special_tokens: bool
) -> None:
    assert calls(parser, text) != []
    assert not accepts(parser, text, has_special_tokens=has_special_tokens)


@pytest.mark.parametrize("text", ["Hm, {}. ", "<think>\nHm.\n", ""])
def test_behind_reasoning_an_answer_of_llama_begins_anew(accepts: Accepts, text: str) -> None:
    assert accepts("llama3_json", f"{text}</think>\n\n{llama()}")
    assert accepts("llama3_json", f"{text}</think>Hello.")
    assert not accepts("llama3_json", f"{text}</think>\n\n{llama(arguments='{}')}")
