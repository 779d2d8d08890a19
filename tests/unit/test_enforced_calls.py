"""Calls that a grammar makes sure of: read as they come, wherever the text is cut."""

from __future__ import annotations

import itertools
import json

import pytest

from frontend.chat.enforced_calls import EnforcedCalls
from frontend.output_parsers.interface import ContentDelta, ToolCallDelta

TRICKY = {"a": '}]{["\\', "b": {"c": [1, {}], "}": "é😀\n"}, "name": "x", "parameters": {}}
ARRAYS = [
    [("f", {})],
    [("f", {"a": 1}), ("g", TRICKY), ("f", {})],
    [("parameters", TRICKY)],
]


def calls_of(pieces: list[str], function_name: str | None = None) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call."""
    ids = itertools.count()
    parser = EnforcedCalls(function_name, lambda: f"id{next(ids)}")
    calls: list[tuple[str, str, str]] = []
    for delta in [*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()]:
        assert isinstance(delta, ToolCallDelta)
        if delta.index == len(calls):
            calls.append((delta.id, delta.name, delta.arguments))
        else:
            call_id, name, arguments = calls[delta.index]
            assert (delta.id, delta.name) == ("", "")
            calls[delta.index] = (call_id, name, arguments + delta.arguments)
    assert parser.tool_calls == len(calls)
    return calls


def pieces_of(text: str) -> list[list[str]]:
    """The text whole, cut in two at each place, and character by character."""
    return [[text], *([text[:cut], text[cut:]] for cut in range(1, len(text))), list(text)]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ensure_ascii", [True, False])
@pytest.mark.parametrize("given", ARRAYS)
def test_an_array_of_calls(given: list[tuple[str, object]], ensure_ascii: bool, indent: int | None):
    array = [{"name": name, "parameters": parameters} for name, parameters in given]
    text = json.dumps(array, ensure_ascii=ensure_ascii, indent=indent) + "\n"
    for pieces in pieces_of(text):
        calls = calls_of(pieces)
        assert [(call_id, name, json.loads(arguments)) for call_id, name, arguments in calls] == [
            (f"id{index}", name, parameters) for index, (name, parameters) in enumerate(given)
        ]


def test_arguments_are_the_text_as_it_was_written():
    assert calls_of(['[ {"name" :"f" , "parameters": {"a":  1.50 } } ]']) == [("id0", "f", '{"a":  1.50 }')]


def test_arguments_come_as_they_are_written():
    parser = EnforcedCalls(None, lambda: "id")
    parser.feed('[{"name": "f", "parameters": {"a": "')
    assert parser.feed("one") == [ToolCallDelta(0, "", "", "one")]


@pytest.mark.parametrize("arguments", [{}, TRICKY])
def test_the_arguments_of_a_named_function(arguments: object):
    text = json.dumps(arguments)
    for pieces in pieces_of(f" {text}\n "):
        assert calls_of(pieces, "f") == [("id0", "f", text)]


@pytest.mark.parametrize("cut", range(1, 40))
def test_an_answer_that_is_cut_off(cut: int):
    text = '[{"name": "f", "parameters": {"a": "x"}}]'[:cut]
    parser = EnforcedCalls(None, lambda: "id")
    deltas = [*parser.feed(text), *parser.finish()]
    if parser.tool_calls:
        shown = "".join(delta.arguments for delta in deltas if isinstance(delta, ToolCallDelta))
        assert '{"a": "x"}'.startswith(shown)
        assert len(deltas) == 2
    else:
        assert deltas == [ContentDelta(text)]
