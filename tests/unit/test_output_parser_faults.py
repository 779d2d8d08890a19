"""Faults that the field's parsers have had, and others found by reading: what a family's text must come out as.

Written against the seam alone (`output_parser`, `ParserOptions`), so that it judges any implementation of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.output_parsers.choice import output_parser
from frontend.output_parsers.interface import (
    ContentDelta,
    OutputDelta,
    ParserOptions,
    ReasoningDelta,
    ToolSchema,
)

_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "value": {}}}
_TOOLS = tuple(ToolSchema(name, _SCHEMA) for name in ("add", "now", "weather"))
Read = tuple[str, str, list[tuple[str, str]]]


def _parser(tools: str | None = None, reasoning: str | None = None, *, is_open: bool = False):
    ids = count()
    return output_parser(ParserOptions(tools, reasoning, is_open, lambda: f"call{next(ids)}", _TOOLS))


def _gather(deltas: Iterable[OutputDelta]) -> Read:
    """(content, reasoning, calls), with the order of ids and names checked on the way."""
    content, reasoning, calls = "", "", []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content += delta.text
        elif isinstance(delta, ReasoningDelta):
            reasoning += delta.text
        elif delta.index == len(calls):
            assert delta.id == f"call{delta.index}"
            calls.append((delta.name, delta.arguments))
        else:
            assert (delta.index, delta.id, delta.name) == (len(calls) - 1, "", "")
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, reasoning, calls


def _read(pieces: Iterable[str], tools: str | None = None, reasoning: str | None = None, is_open: bool = False) -> Read:
    parser = _parser(tools, reasoning, is_open=is_open)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    result = _gather([*deltas, *parser.finish()])
    assert parser.tool_calls == len(result[2])
    return result


_A = '{"a": 3.5, "b": 4}'
_TRICKY = (
    '{"s": "} ] </tool_call> [TOOL_CALLS] <think> \\" \\\\", "o": {"x": [1, {"y": {}}]}, "u": "\\u00e9 \U0001f600é"}'
)
# name: (tool parser, reasoning parser, text, content, reasoning, calls)
CASES = {
    "hermes: content before": (
        "hermes",
        None,
        f'Well:\n<tool_call>\n{{"name": "add", "arguments": {_A}}}\n</tool_call>',
        "Well:",
        "",
        [("add", _A)],
    ),
    "hermes: number before the last braces": (
        "hermes",
        None,
        '<tool_call>{"name": "add", "arguments": {"o": {"a": 1}}}</tool_call>',
        "",
        "",
        [("add", '{"o": {"a": 1}}')],
    ),
    "hermes: empty arguments": (
        "hermes",
        None,
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        "",
        [("now", "{}")],
    ),
    "hermes: braces, marks and escapes in strings": (
        "hermes",
        None,
        f'<tool_call>{{"name": "add", "arguments": {_TRICKY}}}</tool_call>',
        "",
        "",
        [("add", _TRICKY)],
    ),
    "hermes: arguments before the name": (
        "hermes",
        None,
        f'<tool_call>{{"arguments": {_A}, "name": "add"}}</tool_call>',
        "",
        "",
        [("add", _A)],
    ),
    "hermes: several": (
        "hermes",
        None,
        f'<tool_call>{{"name": "add", "arguments": {_A}}}</tool_call>\n<tool_call>{{"name": "now", "arguments": {{}}}}'
        "</tool_call>",
        "",
        "",
        [("add", _A), ("now", "{}")],
    ),
    "hermes: cut off in the arguments": (
        "hermes",
        None,
        '<tool_call>{"name": "add", "arguments": {"a": 3',
        "",
        "",
        [("add", '{"a": 3')],
    ),
    "hermes: cut off in the mark": ("hermes", None, "a < b <tool_ca", "a < b <tool_ca", "", []),
    "hermes: no JSON": (
        "hermes",
        None,
        "<tool_call>add(1)</tool_call>",
        "<tool_call>add(1)</tool_call>",
        "",
        [],
    ),
    "hermes: a brace is missing": (
        "hermes",
        None,
        f'<tool_call>{{"name": "add", "arguments": {_A}</tool_call>',
        "",
        "",
        [("add", _A)],
    ),
    "llama3: bare": ("llama3_json", None, f'{{"name": "add", "parameters": {_A}}}', "", "", [("add", _A)]),
    "llama3: tag, several": (
        "llama3_json",
        None,
        f'<|python_tag|>{{"name": "add", "parameters": {_A}}}; {{"name": "now", "parameters": {{}}}}<|eom_id|>',
        "",
        "",
        [("add", _A), ("now", "{}")],
    ),
    "llama3: an object that is no call": ("llama3_json", None, '{"a": 1}', '{"a": 1}', "", []),
    "llama3: an object with a name that is no tool": (
        "llama3_json",
        None,
        '{"name": "Alice"}',
        '{"name": "Alice"}',
        "",
        [],
    ),
    "llama3: an object within text": (
        "llama3_json",
        None,
        'Write {"name": "add", "parameters": {}} for it',
        'Write {"name": "add", "parameters": {}} for it',
        "",
        [],
    ),
    "llama3: text with commas": ("llama3_json", None, "Yes, so; {it} is.", "Yes, so; {it} is.", "", []),
    "mistral: array": (
        "mistral",
        None,
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {_A}}}, {{"name": "now", "arguments": {{}}}}]</s>',
        "",
        "",
        [("add", _A), ("now", "{}")],
    ),
    "mistral: names, content before, several": (
        "mistral",
        None,
        f"I will.[TOOL_CALLS]add{_A}[TOOL_CALLS]now{{}}",
        "I will.",
        "",
        [("add", _A), ("now", "{}")],
    ),
    "mistral: ARGS": ("mistral", None, f"[TOOL_CALLS]add[ARGS]{_TRICKY}", "", "", [("add", _TRICKY)]),
    "mistral: no call": ("mistral", None, "[TOOL_CALLS] none here", "[TOOL_CALLS] none here", "", []),
    "qwen3_coder": (
        "qwen3_coder",
        None,
        "<tool_call>\n<function=add>\n<parameter=text>\n<b>1 < 2</b>\n</parameter>\n</function>\n</tool_call>",
        "",
        "",
        [("add", '{"text": "<b>1 < 2</b>"}')],
    ),
    "qwen3: reasoning, then a call": (
        "hermes",
        "qwen3",
        f'<think>\nhm <tool_call>\n</think>\n\n<tool_call>{{"name": "add", "arguments": {_A}}}</tool_call>',
        "",
        "hm <tool_call>",
        [("add", _A)],
    ),
    "qwen3: no reasoning": (None, "qwen3", "a <think> b", "a <think> b", "", []),
    "qwen3: empty reasoning": (None, "qwen3", "<think>\n\n</think>\n\nYes.", "Yes.", "", []),
    "qwen3: the mark twice": (None, "qwen3", "<think><think>x</think>y", "y", "<think>x", []),
    "r1: without its opening mark": (None, "deepseek_r1", "hm\n</think>\n\nYes.", "Yes.", "hm", []),
    "r1: cut off": (None, "deepseek_r1", "<think>hm</thi", "", "hm</thi", []),
}


@pytest.mark.parametrize("case", CASES)
def test_whole(case: str) -> None:
    tools, reasoning, text, *expected = CASES[case]
    assert _read([text], tools, reasoning) == tuple(expected)


@pytest.mark.parametrize("case", CASES)
def test_cut_at_every_character_and_into_single_ones(case: str) -> None:
    tools, reasoning, text, *_ = CASES[case]
    whole = _read([text], tools, reasoning)
    for cut in range(len(text) + 1):
        assert _read([text[:cut], text[cut:]], tools, reasoning) == whole, cut
    assert _read(text, tools, reasoning) == whole


_MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<function=add>", "<parameter=text>", "</parameter>", "</function>"),
)
_JSON = (
    '{"name": "add", ',
    '"arguments": ',
    '"parameters": ',
    "{}",
    '"',
    "\\",
    "\\ud800",
    "\\x",
    *"{}[],;:",
    "null",
    "NaN",
)
_FRAGMENTS = st.sampled_from((*_MARKS, *_JSON, "\n", " ", "add", "é", "<", "1"))


@pytest.mark.parametrize("tools", [None, "hermes", "llama3_json", "mistral", "qwen3_coder"])
@pytest.mark.parametrize("reasoning", [None, "qwen3", "deepseek_r1"])
@given(st.lists(_FRAGMENTS, max_size=14), st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_garbage_neither_raises_nor_depends_on_the_cuts(
    tools: str | None, reasoning: str | None, fragments: list[str], is_open: bool, data: st.DataObject
) -> None:
    if tools is None and reasoning is None:
        return
    text = "".join(fragments)
    whole = _read([text], tools, reasoning, is_open)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _read(pieces, tools, reasoning, is_open) == whole
    # A lone surrogate cannot be sent.
    json.dumps(whole, ensure_ascii=False).encode()


@pytest.mark.parametrize("arguments", [r'"\x"', '"a\nb"', r'"\ud800"', '"', "{"])
def test_arguments_that_are_no_json_do_not_raise(arguments: str) -> None:
    result = _read([f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'], "hermes")
    json.dumps(result, ensure_ascii=False).encode()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "[" * 100_000, "1" * 5000])
def test_values_written_as_text_become_json(value: str) -> None:
    text = f"<tool_call><function=add><parameter=value>{value}</parameter></function></tool_call>"
    _, _, [(_, arguments)] = _read([text], "qwen3_coder")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert json.loads(arguments, parse_constant=refuse, parse_int=str) == {"value": value}


@pytest.mark.parametrize("field", ["arguments", "parameters"])
def test_one_object_is_one_call(field: str) -> None:
    text = f'<tool_call>{{"name": "add", "{field}": {{}}, "{field}": {{}}}}</tool_call>'
    assert len(_read([text], "hermes")[2]) == 1


@pytest.mark.parametrize("tools", ["hermes", "llama3_json", "mistral", "qwen3_coder"])
def test_content_flows_at_once(tools: str) -> None:
    parser = _parser(tools)
    for word in ("Plain", " words", " <b>", " and", " more"):
        assert _gather(parser.feed(word))[0] == word


@pytest.mark.parametrize(
    ("tools", "before"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"text": "'),
        ("llama3_json", '{"name": "add", "parameters": {"text": "'),
        ("mistral", '[TOOL_CALLS]add{"text": "'),
        ("qwen3_coder", "<tool_call><function=add><parameter=text>"),
    ],
)
def test_a_long_string_streams(tools: str, before: str) -> None:
    parser = _parser(tools)
    parser.feed(before)
    deltas = parser.feed("word " * 20)
    assert "word word" in "".join(getattr(delta, "arguments", "") for delta in deltas)


_FLOODS = {
    "white space": ("hermes", None, "\n"),
    "a string": ("hermes", '<tool_call>{"name": "add", "arguments": {"text": "', "é"),
    "a value": ("qwen3_coder", "<tool_call><function=add><parameter=text>", "é"),
}


@pytest.mark.parametrize("flood", _FLOODS)
def test_four_times_the_text_costs_about_four_times(flood: str) -> None:
    """What grows with the square holds up the event loop; the ratio is far from both, so that noise does not matter."""
    tools, before, character = _FLOODS[flood]

    def cost(num: int) -> float:
        parser = _parser(tools)
        parser.feed(before or "")
        begin = time.process_time()
        parser.feed(character * num)
        parser.feed("x")
        parser.finish()
        return time.process_time() - begin

    assert min(cost(80_000) for _ in range(2)) < 12 * max(min(cost(20_000) for _ in range(2)), 0.005)
