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


def any_tool(tool: Tool) -> str:
    """No tool is refused."""
    return ""


@dataclass(frozen=True, slots=True)
class Family:
    """How a family writes calls. `special_tokens`: marks that are special tokens in the tokenizers of some models."""

    calls_among_text: Callable[[Sequence[Tool], bool], Format]
    special_tokens: tuple[str, ...]
    # Why a strict tool cannot be enforced; empty if it can.
    refusal: Callable[[Tool], str] = any_tool


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


def moved(schema: Any, place: str) -> Any:
    """The schema at `place` in another one: what pointed to its root points there."""
    if isinstance(schema, list):
        return [moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        result["$ref"] = f"{place}{reference[1:]}"
    return result
