"""Which parser reads a model's text: by name, or by the model's family.

No family has one yet, so nobody is told that its calls or its reasoning could be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frontend.output_parsers.interface import OutputParser


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool in force, as far as a parser has to know it."""

    name: str


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Parsers are names, or None; `reasoning_open`: the prompt has opened the reasoning already."""

    tool_parser: str | None
    reasoning_parser: str | None
    reasoning_open: bool
    tool_call_id: Callable[[], str]
    tools: tuple[ToolSchema, ...] = ()


_PARSERS: dict[tuple[str | None, str | None], Callable[[ParserOptions], OutputParser]] = {}
TOOL_PARSERS: tuple[str, ...] = ()
REASONING_PARSERS: tuple[str, ...] = ()


def output_parser(options: ParserOptions) -> OutputParser:
    """The parser of one choice; names must be known."""
    return _PARSERS[options.tool_parser, options.reasoning_parser](options)


def families(model_type: str, chat_template: str) -> tuple[str | None, str | None]:
    """Names of the tool parser and the reasoning parser for a model."""
    return None, None


def keeps_special_tokens(tool_parser: str) -> bool:
    """Whether the marks of the calls are special tokens, which must then stay in the text."""
    return False
