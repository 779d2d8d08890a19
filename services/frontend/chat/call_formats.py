"""Free text with calls among it, as each family's parser reads them, in the language of structural tags. Pure.

A format is right when whatever the parser takes for a call has arguments of the tool's schema: text in which the parser
would find a call of any other shape has to be impossible. What is forbidden in text beyond that is said at each family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from frontend.chat.tools import Tool

Format = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family writes calls. `special_tokens`: marks that are special tokens in the tokenizers of some models."""

    calls_among_text: Callable[[Sequence[Tool], bool], Format]
    special_tokens: tuple[str, ...]


def text(*excludes: str) -> Format:
    """Any text, also none, in which these strings do not occur."""
    return {"type": "any_text", "excludes": list(excludes)}


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def one_of(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def star(content: Format) -> Format:
    """Any number of times."""
    return {"type": "star", "content": content}


def arguments(tool: Tool) -> Format:
    """JSON of the tool's schema; of a tool that is not strict any object."""
    return {"type": "json_schema", "json_schema": tool.parameters if tool.is_strict else {"type": "object"}}


def call_object(tool: Tool, key: str) -> Format:
    """{"name": ..., KEY: {...}}"""
    return sequence(const(f'{{"name": {json.dumps(tool.name)}, "{key}": '), arguments(tool), const("}"))
