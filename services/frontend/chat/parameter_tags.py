"""Calls whose arguments stand between tags, each a text of its own: <parameter=key>, value, </parameter>. Pure.

A parameter of type string is its text as it is, any other is JSON. A schema is enforced as far as that can be said part
by part: its properties, in their order, and no others. What limits a string otherwise than by a list is refused: the
library would let go of the limit, or let the end of the value stand within it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from frontend.chat.call_formats import Format, const, moved, one_of, optional, sequence, star, text
from frontend.chat.tools import Tool

_FUNCTION, _FUNCTION_END, _END = "<function=", "</function>", "\n</tool_call>"
_PARAMETER_END = "</parameter>"
_KEY = re.compile(r"[\w.$-]+")
_NOTES = frozenset({"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "title"})
_OF_OBJECT = _NOTES | {"$defs", "additionalProperties", "definitions", "properties", "required", "type"}
_OF_STRING = _NOTES | {"const", "enum", "type"}
_REFUSED = frozenset({"format", "maxLength", "minLength", "pattern", "patternProperties", "propertyNames"})
_NAMED_SCHEMAS = ("$defs", "definitions", "patternProperties", "properties")
_VALUES = ("const", "default", "enum", "examples")


def tagged_calls(tools: Sequence[Tool], is_parallel: bool) -> Format:
    """Free text, and calls of these tools in it."""
    free = text(_FUNCTION)
    functions = one_of([sequence(const(f"{tool.name}>\n"), _parameters(tool), const(_FUNCTION_END)) for tool in tools])
    call = sequence(const(_FUNCTION), functions, const(_END))
    return sequence(free, star(sequence(call, free)) if is_parallel else optional(call))


def refusal(tool: Tool) -> str:
    """Why a strict tool can not be enforced between tags; empty if it can."""
    schema = tool.parameters
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if others := sorted(schema.keys() - _OF_OBJECT) or sorted(_REFUSED.intersection(_keywords(schema))):
        return f"{others[0]} is not supported"
    if not isinstance(schema.get("additionalProperties", False), bool):
        return "a schema of additionalProperties is not supported"
    if not (isinstance(properties, dict) and isinstance(required, list)) or any(
        not isinstance(key, str) or key not in properties for key in required
    ):
        return "required and properties do not fit together"
    for key, value in properties.items():
        if not _KEY.fullmatch(key):
            return "a name of a property has other characters than letters, digits, _, ., $ and -"
        if _is_text(value) and (others := sorted(value.keys() - _OF_STRING)):
            return f"{others[0]} is not supported for a string"
        if _is_text(value) and not _listed(value, [""]):
            return "a list of values without a string is not supported for a string"
    return ""


def _parameters(tool: Tool) -> Format:
    if not tool.is_strict:
        # Were there a call in it, the parser might read that one.
        return text(_FUNCTION, _FUNCTION_END)
    required = tool.parameters.get("required", [])
    tags = [
        tag if key in required else optional(tag)
        for key, value in tool.parameters.get("properties", {}).items()
        for tag in [sequence(const(f"<parameter={key}>\n"), _value(tool, key, value), const(f"\n{_PARAMETER_END}\n"))]
    ]
    return sequence(*tags) if tags else const("")


def _value(tool: Tool, key: str, schema: Any) -> Format:
    if _is_text(schema):
        values = _listed(schema, [])
        return one_of([const(value) for value in values]) if values else text(_PARAMETER_END)
    if "$ref" in _keywords(schema):
        schema = {"$ref": f"#/$defs/tool/properties/{key}", "$defs": {"tool": moved(tool.parameters, "#/$defs/tool")}}
    return {"type": "json_schema", "json_schema": schema, "excludes": [_PARAMETER_END]}


def _is_text(schema: Any) -> bool:
    """What the parser takes as it is."""
    return isinstance(schema, dict) and schema.get("type") == "string"


def _listed(schema: dict[str, Any], otherwise: list[str]) -> list[str]:
    """The strings that the schema names one by one; `otherwise` where it names none."""
    if "const" not in schema and "enum" not in schema:
        return otherwise
    named = [schema["const"]] if "const" in schema else schema["enum"]
    values = named if isinstance(named, list) else []
    return [value for value in values if isinstance(value, str) and _PARAMETER_END not in value]


def _keywords(schema: Any) -> Iterator[str]:
    """Of a schema and of those within it; names of properties are none."""
    if isinstance(schema, list):
        for part in schema:
            yield from _keywords(part)
    if isinstance(schema, dict):
        yield from schema
        for key, value in schema.items():
            if key in _NAMED_SCHEMAS and isinstance(value, dict):
                yield from _keywords(list(value.values()))
            elif key not in _VALUES:
                yield from _keywords(value)
