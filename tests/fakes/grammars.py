"""Grammars over the fake vocabulary: one of every kind, broken ones of every kind, and what they allow next."""

from __future__ import annotations

import json

import numpy as np

from engine_core.scheduler.grammar import GrammarSpec
from engine_core.structured_output.grammar_compiler import GrammarCompiler
from engine_core.structured_output.grammar_state import GrammarState
from fakes.fake_executor import FAKE_VOCABULARY, VOCAB_SIZE

EOS = 2

GOOD = {
    "json_schema": GrammarSpec("json_schema", '{"type": "integer", "minimum": 10, "maximum": 99}'),
    "json_object": GrammarSpec("json_object", ""),
    "regex": GrammarSpec("regex", "[ab]{3}"),
    "grammar": GrammarSpec("grammar", 'root ::= "(" root ")" | "x"'),
    "choice": GrammarSpec("choice", json.dumps(["yes", 'a "quoted" é\n', "no"])),
    "structural_tag": GrammarSpec(
        "structural_tag",
        json.dumps(
            {
                "type": "structural_tag",
                "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "x+"}, "end": "</a>"},
            }
        ),
    ),
}
# An output of each.
OUTPUTS = {
    "json_schema": "42",
    "json_object": '{"a": [1, null], "b": {"c": "d"}}',
    "regex": "aba",
    "grammar": "((x))",
    "choice": 'a "quoted" é\n',
    "structural_tag": "<a>xx</a>",
}
_DEEP = "(" * 60_000 + "a" + ")" * 60_000
BROKEN = [
    GrammarSpec("json_schema", '{"type": '),
    GrammarSpec("json_schema", "5"),
    GrammarSpec("json_schema", '{"type": "banana"}'),
    GrammarSpec("json_schema", '{"type": 5}'),
    GrammarSpec("json_schema", '{"$ref": "#/nowhere"}'),
    GrammarSpec("json_schema", '{"$ref": "#"}'),
    GrammarSpec("json_schema", '{"type": "integer", "minimum": 5, "maximum": 1}'),
    GrammarSpec("json_schema", '{"type": "string", "pattern": "(["}'),
    GrammarSpec("json_schema", '{"enum": []}'),
    GrammarSpec("json_schema", '{"not": {"type": "string"}}'),
    GrammarSpec("json_schema", '{"type": "array", "items": ' * 5000 + "{}" + "}" * 5000),
    # Each of these would overflow the stack of the compiler.
    GrammarSpec("json_schema", json.dumps({"type": "string", "pattern": _DEEP})),
    GrammarSpec("json_schema", json.dumps({"type": "object", "patternProperties": {_DEEP: {}}})),
    GrammarSpec("json_schema", json.dumps({"type": "object", "propertyNames": {"type": "string", "pattern": _DEEP}})),
    GrammarSpec("regex", _DEEP),
    GrammarSpec(
        "structural_tag",
        json.dumps(
            {
                "type": "structural_tag",
                "format": {"type": "json_schema", "json_schema": {"type": "string", "pattern": _DEEP}},
            }
        ),
    ),
    # Half a character in the text of the error.
    GrammarSpec("json_schema", '{"type": "object", "properties": {"\\ud800": {"not": {}}}}'),
    GrammarSpec("json_schema", '{"type": "string", "format": "\\ud800"}'),
    GrammarSpec("regex", "(["),
    GrammarSpec("regex", "*"),
    GrammarSpec("regex", r"(a)\1"),
    GrammarSpec("regex", "(" * 50_000 + "a" + ")" * 50_000),
    GrammarSpec("grammar", ""),
    GrammarSpec("grammar", "root ::= nowhere"),
    GrammarSpec("grammar", 'other ::= "a"'),
    GrammarSpec("grammar", "root ::= root"),
    GrammarSpec("grammar", 'root ::= "a'),
    GrammarSpec("choice", "[]"),
    GrammarSpec("structural_tag", "{"),
    GrammarSpec("structural_tag", "{}"),
    GrammarSpec("structural_tag", '{"type": "structural_tag", "format": {"type": "nothing"}}'),
]


def make_compiler(**arguments: object) -> GrammarCompiler:
    """One compile thread, a clock that stands still, and room for every grammar, unless told otherwise."""
    defaults: dict[str, object] = {
        "num_threads": 1,
        "timeout_s": 30.0,
        "cache_bytes": 2**30,
        "clock": lambda: 0.0,
    }
    return GrammarCompiler(FAKE_VOCABULARY, **{**defaults, **arguments})  # type: ignore[arg-type]


def allowed_next(state: GrammarState) -> set[int]:
    """The ids whose bits are set in the state's mask."""
    words = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
    state.fill(words, 0)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def spell(text: str) -> list[int]:
    """A text as ids of the fake vocabulary, one for each byte that has one, else by its words."""
    by_bytes = {token: token_id for token_id, token in enumerate(FAKE_VOCABULARY.tokens) if token}
    return [by_bytes[bytes([byte])] for byte in text.encode()]
