"""From a constraint to a compiled grammar, kind by kind, through xgrammar.

One backend for every kind, chosen here and nowhere else. Pure functions; they run in the compile threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import xgrammar

from engine_core.scheduler.grammar import GrammarSpec
from engine_core.structured_output.regex_support import unsupported_in_regex
from engine_core.structured_output.schema_support import unenforced

# Between two parts of a JSON text. Without a bound a model that likes spaces never ends; with this one seven levels
# of an indented text still fit.
_MAX_WHITESPACE = 16
_MAX_PROBLEMS = 3


# The constraint is part of the request, and errors travel through the logs of others. The library repeats it behind
# these words, between quotes and in pointers; what it quotes of its own is short, or "root".
_QUOTING_TAILS = (" The JSON string is", ", but got ", " not recognized: ")
_QUOTED = re.compile(r"""(?!"root")(["'])(?:(?!\1).){2,}\1|#/\S+""")


class GrammarError(Exception):
    """The constraint can not be used; the text is for the caller."""


class _UnenforcedError(Exception):
    """In words of our own, which name places and quote no more than names."""


def compile_spec(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
    """Raises GrammarError."""
    compile_kind = _COMPILE.get(spec.kind)
    if compile_kind is None:
        raise GrammarError(f"{spec.kind} is no kind of constraint that this engine knows")
    try:
        return compile_kind(compiler, spec.text)
    except _UnenforcedError as error:
        raise GrammarError(f"{spec.kind} does not compile: {error}") from error
    except (RuntimeError, ValueError, RecursionError) as error:
        raise GrammarError(f"{spec.kind} does not compile: {_in_one_line(error)}") from error


def _json_schema(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    _refuse_unenforced(unenforced(json.loads(text)))
    return compiler.compile_json_schema(text, max_whitespace_cnt=_MAX_WHITESPACE)


def _json_object(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    return compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=_MAX_WHITESPACE)


def _regex(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    _refuse_unenforced(f"{problem} is not supported" for problem in unsupported_in_regex(text))
    return compiler.compile_regex(text)


def _grammar(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    return compiler.compile_grammar(text)


def _choice(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    # The escapes of a JSON string are those of a string in the grammar notation.
    choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
    return compiler.compile_grammar(f"root ::= {' | '.join(choices)}")


def _structural_tag(compiler: xgrammar.GrammarCompiler, text: str) -> xgrammar.CompiledGrammar:
    _refuse_unenforced(_unenforced_in_tags(json.loads(text)))
    return compiler.compile_structural_tag(text)


def _unenforced_in_tags(part: Any) -> Iterator[str]:
    """The same of every schema in a structural tag, wherever its formats nest them."""
    if isinstance(part, dict):
        if part.get("type") == "json_schema":
            yield from unenforced(part.get("json_schema"))
        if part.get("type") == "regex" and isinstance(part.get("pattern"), str):
            yield from (f"{problem} is not supported" for problem in unsupported_in_regex(part["pattern"]))
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _unenforced_in_tags(inner)


def _refuse_unenforced(problems: Iterator[str]) -> None:
    named = list(islice(problems, _MAX_PROBLEMS))
    if named:
        raise _UnenforcedError("; ".join(named))


_COMPILE: dict[str, Callable[[xgrammar.GrammarCompiler, str], xgrammar.CompiledGrammar]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
    "structural_tag": _structural_tag,
}


def _in_one_line(error: Exception) -> str:
    """What the library says, without the time and the place in its source in front, and without what it quotes."""
    text = " ".join(str(error).split())
    text = text.split("Check failed: ")[-1].split(".cc:")[-1].lstrip("0123456789: ")
    for tail in _QUOTING_TAILS:
        text = text.partition(tail)[0]
    return _QUOTED.sub("...", text) or type(error).__name__
