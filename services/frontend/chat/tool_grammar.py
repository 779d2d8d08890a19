"""From the tools in force to a constraint on the text, so that a call cannot break its schema. Pure.

A required call is a JSON array and nothing around it, a named function its arguments alone: no model family has to know
either form. Calls among free text are written as the family writes them: `call_families` knows how.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from frontend.chat.call_families import FAMILIES
from frontend.chat.call_formats import moved
from frontend.chat.tools import Tool


def refusal(tool_parser: str, tool: Tool) -> str:
    """Why this strict tool cannot be enforced in calls among free text; empty if it can."""
    return FAMILIES[tool_parser].refusal(tool)


def array_schema(tools: Sequence[Tool], *, is_parallel: bool) -> str:
    """JSON schema of one or more calls: [{"name": ..., "parameters": ...}]."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_item(tool, index) for index, tool in enumerate(tools)]},
        "$defs": {_key(index): moved(tool.parameters, f"#/$defs/{_key(index)}") for index, tool in enumerate(tools)},
    }
    if not is_parallel:
        schema["maxItems"] = 1
    return _dump(schema)


def arguments_schema(tool: Tool) -> str:
    """JSON schema of a named function's arguments."""
    return _dump(tool.parameters)


def structural_tag(tool_parser: str, tools: Sequence[Tool], *, is_parallel: bool) -> str:
    """Free text with calls in the family's way; arguments of a tool that is not strict are any JSON object."""
    family = FAMILIES[tool_parser]
    return _dump(
        {
            "type": "structural_tag",
            "format": family.calls_among_text(tools, is_parallel),
            # The engine's addition to the library's language: those that the text may hold.
            "special_tokens": family.special_tokens,
        }
    )


def _item(tool: Tool, index: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/{_key(index)}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _key(index: int) -> str:
    return f"tool{index}"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
