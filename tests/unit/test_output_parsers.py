"""Parsers of models' text: what they find, and that it makes no difference how the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.output_parsers.choice import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    families,
    keeps_special_tokens,
    output_parser,
)
from frontend.output_parsers.interface import (
    ContentDelta,
    OutputDelta,
    ParserOptions,
    ReasoningDelta,
    ToolCallDelta,
    ToolSchema,
)
from frontend.output_parsers.text_reader import joined

WEATHER = ToolSchema(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array"},
        },
    },
)
TRICKY = '{"text": "} ] </tool_call> [TOOL_CALLS] \\" \\\\", "deep": {"list": [[1], {"a": null}]}, "é": "日本 🎉"}'


def parse(pieces: list[str], tool_parser: str | None, reasoning_parser: str | None = None, *, is_open: bool = False):
    numbers = itertools.count()
    options = ParserOptions(
        tool_parser, reasoning_parser, is_open, lambda: f"call-{next(numbers)}", (WEATHER, ToolSchema("ping", {}))
    )
    parser = output_parser(options)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return joined([*deltas, *parser.finish()]), parser.tool_calls


def call(index: int, name: str, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(index, f"call-{index}", name, arguments)


C, R = ContentDelta, ReasoningDelta
CASES: list[tuple[str, str, list[OutputDelta]]] = [
    # hermes
    ("hermes", "Hello, <b>you</b> < 3 <tool", [C("Hello, <b>you</b> < 3 <tool")]),
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        [call(0, "weather", '{"city": "Rome"}')],
    ),
    ("hermes", f'<tool_call>{{"arguments": {TRICKY}, "name": "ping"}}</tool_call>', [call(0, "ping", TRICKY)]),
    ("hermes", f'<tool_call>{{"name": "ping", "arguments": {TRICKY}}}</tool_call>', [call(0, "ping", TRICKY)]),
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>\n Done.<|im_end|>',
        [C("Let me look."), call(0, "ping", "{}"), call(1, "weather", '{"days": 2}'), C("\n Done.")],
    ),
    ("hermes", '<tool_call>{"name": "ping"}</tool_call>', [call(0, "ping", "{}")]),
    ("hermes", '<tool_call>{"name": "ping", "arguments": null}</tool_call>', [call(0, "ping", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "ping", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [call(0, "ping", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "p\\u00e9", "arguments": {}}</tool_call>', [call(0, "pé", "{}")]),
    # Without its end; and what is no call at all.
    ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": [1, 2', [call(0, "ping", '{"a": [1, 2')]),
    ("hermes", '<tool_call>{"name": "ping", "argu', [C('<tool_call>{"name": "ping", "argu')]),
    ("hermes", "<tool_call>no</tool_call> after", [C("<tool_call>no</tool_call> after")]),
    ("hermes", '<tool_call>{"nome": 3}</tool_call>', [C('<tool_call>{"nome": 3}</tool_call>')]),
    ("hermes", '<tool_call>{"name": "\\q", "arguments": {}}', [C('<tool_call>{"name": "\\q", "arguments": {}}')]),
    ("hermes", '<tool_call>{"name": "ping", "arguments": 3}', [C('<tool_call>{"name": "ping", "arguments": 3}')]),
    (
        "hermes",
        '<tool_call>{"name": "ping", "arguments": {"a": 1]} or so',
        [call(0, "ping", '{"a": 1]'), C("} or so")],
    ),
    (
        "hermes",
        '<tool_call>oops <tool_call>{"name": "ping", "arguments": {}}</tool_call>',
        [C("<tool_call>oops"), call(0, "ping", "{}")],
    ),
    # llama3_json
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Rome"}}<|eom_id|>',
        [call(0, "weather", '{"city": "Rome"}')],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "ping", "parameters": {}}; '
        '{"name": "ping", "parameters": {"a": 1}}',
        [call(0, "ping", "{}"), call(1, "ping", '{"a": 1}')],
    ),
    ("llama3_json", '{"answer": 42} is JSON', [C('{"answer": 42} is JSON')]),
    ("llama3_json", '{"name": "Ada"}', [C('{"name": "Ada"}')]),
    ("llama3_json", '{"name": "ping"}', [call(0, "ping", "{}")]),
    (
        "llama3_json",
        'An object: {"name": "ping", "parameters": {}}',
        [C('An object: {"name": "ping", "parameters": {}}')],
    ),
    ("llama3_json", "First; second, third", [C("First; second, third")]),
    (
        "llama3_json",
        'I call. <|python_tag|>{"name": "ping", "parameters": {}}; and more',
        [C("I call."), call(0, "ping", "{}"), C("; and more")],
    ),
    # mistral
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "ping", "arguments": {}}, {"name": "weather", "arguments": {"days": 1}}]</s>',
        [call(0, "ping", "{}"), call(1, "weather", '{"days": 1}')],
    ),
    (
        "mistral",
        'Yes.[TOOL_CALLS]ping{"a": {"b": "}"}}[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        [C("Yes."), call(0, "ping", '{"a": {"b": "}"}}'), call(1, "weather", '{"city": "Rome"}')],
    ),
    ("mistral", '[TOOL_CALLS]ping[CALL_ID]abc123[ARGS]{"a": 1}', [call(0, "ping", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS] no call", [C("[TOOL_CALLS] no call")]),
    ("mistral", '[TOOL_CALLS]{"a": 1}', [C('[TOOL_CALLS]{"a": 1}')]),
    ("mistral", "[TOOL] [1] [TOOL_CALL", [C("[TOOL] [1] [TOOL_CALL")]),
    ("mistral", "[TOOL_CALLS] [3]", [C("[TOOL_CALLS] [3]")]),
    # qwen3_coder
    (
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=tags>\n[1, 2]\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>",
        [
            C("Sure."),
            call(0, "weather", '{"city": "New\\nYork", "days": 3, "metric": true, "tags": [1, 2]}'),
        ],
    ),
    ("qwen3_coder", "<tool_call><function=ping></function></tool_call>", [call(0, "ping", "{}")]),
    (
        "qwen3_coder",
        "<function=ping><parameter=a>b<c</parameter></function> x",
        [call(0, "ping", '{"a": "b<c"}'), C(" x")],
    ),
    ("qwen3_coder", "<tool_call>what</tool_call>", [C("<tool_call>what</tool_call>")]),
    ("qwen3_coder", "<tool_call><function=ping>oops", [call(0, "ping", ""), C("oops")]),
]
REASONING: list[tuple[str, bool, str, list[OutputDelta]]] = [
    ("qwen3", False, "<think>\nI see <b> \n</think>\n\nIt is so.", [R("I see <b>"), C("It is so.")]),
    ("qwen3", False, "It is so. <think>no</think>", [C("It is so. <think>no</think>")]),
    ("qwen3", False, "  <thinks> about", [C("  <thinks> about")]),
    ("qwen3", True, "I see\n</think>\n\n ok", [R("I see"), C("ok")]),
    ("qwen3", False, "<think>\n\n</think>\n\nok", [C("ok")]),
    ("qwen3", False, "<think>never ends </thi", [R("never ends </thi")]),
    ("deepseek_r1", False, "I see</think>ok", [R("I see"), C("ok")]),
    ("deepseek_r1", False, "<think>I see\n\nthere</think>ok", [R("I see\n\nthere"), C("ok")]),
    ("deepseek_r1", False, "all of it", [R("all of it")]),
    ("deepseek_r1", False, "", []),
    ("qwen3", False, "  ", [C("  ")]),
]


def cuts(text: str) -> list[list[str]]:
    """Whole, in two at every character, and character by character."""
    return [[text], *([text[:at], text[at:]] for at in range(1, len(text))), list(text)]


@pytest.mark.parametrize(("tool_parser", "text", "expected"), CASES, ids=[f"{c[0]} {c[1][:40]}" for c in CASES])
def test_calls_at_every_cut(tool_parser, text, expected):
    for pieces in cuts(text):
        found, num_calls = parse(pieces, tool_parser)
        assert found == expected, pieces
        assert num_calls == sum(isinstance(delta, ToolCallDelta) for delta in expected)


@pytest.mark.parametrize(("parser", "is_open", "text", "expected"), REASONING, ids=[r[2][:40] for r in REASONING])
def test_reasoning_at_every_cut(parser, is_open, text, expected):
    for pieces in cuts(text):
        assert parse(pieces, None, parser, is_open=is_open)[0] == expected, pieces


def test_calls_behind_reasoning():
    text = '<think>\n<tool_call> is what I need\n</think>\n\n<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    for pieces in cuts(text):
        found, num_calls = parse(pieces, "hermes", "qwen3")
        assert found == [R("<tool_call> is what I need"), call(0, "ping", "{}")]
        assert num_calls == 1


ALL_TEXTS = [(c[0], c[1]) for c in CASES]


@given(st.sampled_from(ALL_TEXTS), st.sampled_from(ALL_TEXTS), st.data())
def test_any_text_at_any_cut(one, other, data):
    """Two cases glued together, one of them cut short, read by the parser of the first: no fault, and one reading."""
    text = one[1][: data.draw(st.integers(0, len(one[1])))] + other[1]
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    assert parse(pieces, one[0]) == parse([text], one[0])


@given(st.text(alphabet='<>tool_ca/{}[]",: \n\\aé', max_size=60))
def test_text_without_a_call_is_all_there(text):
    found, num_calls = parse([text], "hermes")
    if not num_calls:
        assert "".join(delta.text for delta in found if isinstance(delta, ContentDelta)) == text


FORMS = {
    "hermes": '<tool_call>{"name": %s, "arguments": %s}</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": %s, "arguments": %s}]',
    "llama3_json": '<|python_tag|>{"name": %s, "parameters": %s}',
    "qwen3_coder": "<tool_call><function=%s>\n<parameter=city>\n%s\n</parameter></function></tool_call>",
}
NAMES = st.sampled_from(("weather", '"weather"', '"\\ud800"'))
VALUES = st.sampled_from(
    ("{}", '"{\\"a\\": \\"\\\\ud800\\"}"', '{"a": ' * 999, "1" * 5000, "NaN", "null", '"', "\\", "é🎉\0", "</function>")
)
ODD = st.sampled_from((None, 5, "x", [], [1], {"type": []}, {"type": "string"}, {"type": ["boolean", {}]}))
SCHEMAS = st.fixed_dictionaries({"properties": ODD | st.fixed_dictionaries({"city": ODD})})


@given(st.sampled_from(TOOL_PARSERS), st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=2), SCHEMAS)
@settings(max_examples=300)
def test_whatever_a_model_says_for_whatever_schema_can_be_sent(tool_parser, calls, schema):
    tools = (ToolSchema("weather", schema),)
    parser = output_parser(ParserOptions(tool_parser, "qwen3", False, lambda: "id", tools))
    text = "".join(FORMS[tool_parser] % call for call in calls)
    for delta in [*parser.feed(text), *parser.finish()]:
        for part in (delta.name, delta.arguments) if isinstance(delta, ToolCallDelta) else (delta.text,):
            part.encode()


def test_arguments_stream_as_they_come():
    parser = output_parser(ParserOptions("hermes", None, False, lambda: "id", ()))
    parser.feed('<tool_call>{"name": "ping", ')
    assert parser.feed('"arguments": {"a": "lo') == [ToolCallDelta(0, "id", "ping", '{"a": "lo')]
    assert parser.feed("ng") == [ToolCallDelta(0, "", "", "ng")]
    assert parser.feed(' text"}') == [ToolCallDelta(0, "", "", ' text"}')]
    assert parser.feed("}</tool_call>") == []


def test_plain_text_is_not_held_back():
    parser = output_parser(ParserOptions("hermes", "qwen3", False, lambda: "id", ()))
    assert parser.feed("Hello") == [C("Hello")]
    assert parser.feed(" wor") == [C(" wor")]
    assert parser.feed("ld <tool_") == [C("ld")]
    assert parser.feed("box>") == [C(" <tool_box>")]


@pytest.mark.parametrize(
    ("model_type", "template", "expected"),
    [
        ("llama", "{% if tools %}<|start_header_id|>{% endif %}", ("llama3_json", None)),
        ("llama", "<|im_start|>", (None, None)),
        ("qwen3", "<tool_call> ... </think>", ("hermes", "qwen3")),
        ("qwen3_moe", "<tool_call>\n<function=", ("qwen3_coder", None)),
        ("mistral", "[TOOL_CALLS]", ("mistral", None)),
        ("qwen2", "<｜Assistant｜> </think>", (None, "deepseek_r1")),
        ("deepseek_v3", "</think>", (None, "deepseek_r1")),
    ],
)
def test_the_family_is_read_from_the_template(model_type, template, expected):
    assert families(model_type, template) == expected


def test_every_name_has_a_parser():
    for name in TOOL_PARSERS:
        assert parse(["plain"], name) == ([C("plain")], 0)
        assert keeps_special_tokens(name)
    for name in REASONING_PARSERS:
        assert parse(["a</think>b"], "hermes", name, is_open=True)[0] == [R("a"), C("b")]
    with pytest.raises(ValueError, match="nothing"):
        output_parser(ParserOptions(None, None, False, lambda: "id"))
