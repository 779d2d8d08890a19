"""Which parts of JSON Schema can not be enforced: the compiler would pass over them, and the answer break the schema.

A constraint that would be silently dropped is refused instead, with the place where it stands. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_UNENFORCED = (
    "$anchor",
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "then",
)
# These hold for values of one type only, and are passed over when no type is given.
_NEED_TYPE = (
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "maximum",
    "maxLength",
    "minimum",
    "minLength",
    "multipleOf",
    "pattern",
)
# Of a schema with one of these the compiler reads nothing else.
_STAND_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_CONSTRAINTS = frozenset(
    {*_STAND_ALONE, *_NEED_TYPE, "additionalItems", "additionalProperties", "items", "maxItems", "maxProperties",
     "minItems", "minProperties", "patternProperties", "prefixItems", "properties", "propertyNames", "required",
     "type", "unevaluatedItems", "unevaluatedProperties"}
)  # fmt: skip
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer",
     "time", "uri", "uri-reference", "uri-template", "uuid"}
)  # fmt: skip
_OF_SCHEMAS = ("$defs", "definitions", "patternProperties", "properties")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("additionalItems", "additionalProperties", "items", "propertyNames", "unevaluatedItems")


def unenforced(schema: Any, path: str = "#") -> Iterator[str]:
    """Each place of a parsed schema that could not be enforced, in words. Raises RecursionError for absurd depth."""
    if not isinstance(schema, dict):
        return
    for problem in _of_keywords(schema):
        yield f"{path}: {problem}"
    for name in _OF_SCHEMAS:
        if isinstance(schema.get(name), dict):
            for key, part in schema[name].items():
                yield from unenforced(part, f"{path}/{name}/{key}")
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(schema.get(name), list):
            for index, part in enumerate(schema[name]):
                yield from unenforced(part, f"{path}/{name}/{index}")
    for name in _SCHEMAS:
        yield from unenforced(schema.get(name), f"{path}/{name}")


def _of_keywords(schema: dict[str, Any]) -> Iterator[str]:
    for keyword in _UNENFORCED:
        if keyword in schema:
            yield f"{keyword} is not supported"
    if schema.get("uniqueItems"):
        yield "uniqueItems is not supported"
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
        yield "$ref can only point into the schema itself, as #/..."
    elif isinstance(reference, str) and not _points_at_schema(reference):
        yield "$ref can only point at a schema that stands where schemas do, such as #/$defs/..."
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "allOf of several schemas is not supported"
    yield from _of_neighbours(schema)
    yield from _of_strings(schema)


def _points_at_schema(reference: str) -> bool:
    """Elsewhere nobody has looked for what can not be enforced."""
    parts = iter(reference.split("/")[1:])
    for part in parts:
        has_names = part in _OF_SCHEMAS or part in _LISTS_OF_SCHEMAS
        if not (part in _SCHEMAS or (has_names and next(parts, None) is not None)):
            return False
    return True


def _of_neighbours(schema: dict[str, Any]) -> Iterator[str]:
    for keyword in _STAND_ALONE:
        if keyword in schema:
            others = sorted((_CONSTRAINTS & set(schema)) - {keyword})
            if others == ["type"] and keyword in ("const", "enum"):
                values = schema[keyword] if keyword == "enum" else [schema[keyword]]
                others = (
                    []
                    if isinstance(values, list) and all(_is_of(value, schema["type"]) for value in values)
                    else others
                )
            if others:
                yield f"{keyword} beside {', '.join(others)} is not supported"
            return
    if "type" not in schema:
        for keyword in _NEED_TYPE:
            if keyword in schema:
                yield f"{keyword} without type is not supported"
    yield from _of_objects(schema)


def _of_objects(schema: dict[str, Any]) -> Iterator[str]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if isinstance(properties, dict) and isinstance(required, list):
        for name in required:
            if name not in properties:
                yield f"{name!r} is required and not among the properties"
    if "patternProperties" in schema and "properties" in schema:
        yield "patternProperties beside properties is not supported"
    if "multipleOf" in schema and schema.get("type") != "integer":
        yield "multipleOf is supported for type integer only"


def _is_of(value: Any, types: Any) -> bool:
    """Whether a value of enum or const has the type that stands beside it."""
    names = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",), list: ("array",)}
    own = names.get(type(value), ("object",) if isinstance(value, dict) else ("null",))
    return any(name in (types if isinstance(types, list) else [types]) for name in own)


def _of_strings(schema: dict[str, Any]) -> Iterator[str]:
    lengths = [keyword for keyword in ("minLength", "maxLength") if keyword in schema]
    for keyword in ("pattern", "format"):
        if keyword in schema and lengths:
            yield f"{keyword} beside {' and '.join(lengths)} is not supported"
    if "format" in schema and schema["format"] not in _FORMATS:
        yield f"format {schema['format']!r} is not supported"
    pattern = schema.get("pattern")
    # Patterns are matched against the JSON text, where a quote and a backslash need an escape.
    if isinstance(pattern, str) and ('"' in pattern or "\\\\" in pattern):
        yield "a pattern with a quote or a backslash in it is not supported"
