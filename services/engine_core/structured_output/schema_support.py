"""Which parts of JSON Schema can not be enforced: the compiler would pass over them, and the answer break the schema.

A constraint that would be silently dropped is refused instead, with the place where it stands. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

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


def unenforced(schema: Any) -> Iterator[str]:
    """Each place of a parsed schema that could not be enforced, in words. Raises RecursionError for absurd depth."""
    seen: set[int] = set()
    yield from _of_schema(schema, "#", seen)
    # Most point at what has been seen; others may point anywhere, as to `#/components/schemas/NAME`.
    for reference in dict.fromkeys(_references(schema)):
        yield from _of_schema(_target(schema, reference), reference, seen)


def _of_schema(schema: Any, path: str, seen: set[int]) -> Iterator[str]:
    """`seen`: identities of the objects that have been looked at; each is once, however many references there are."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    for problem in _of_keywords(schema):
        yield f"{path}: {problem}"
    for name in _OF_SCHEMAS:
        if isinstance(schema.get(name), dict):
            for key, part in schema[name].items():
                yield from _of_schema(part, f"{path}/{name}/{key}", seen)
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(schema.get(name), list):
            for index, part in enumerate(schema[name]):
                yield from _of_schema(part, f"{path}/{name}/{index}", seen)
    for name in _SCHEMAS:
        yield from _of_schema(schema.get(name), f"{path}/{name}", seen)


def _references(part: Any) -> Iterator[str]:
    """All that point into the schema, wherever they stand."""
    if isinstance(part, dict):
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            yield reference
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            yield from _references(inner)


def _target(schema: Any, reference: str) -> Any:
    """What a JSON pointer in a URI points at; None when it is nothing, which the compiler refuses."""
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict) and name in schema:
            schema = schema[name]
        else:
            return None
    return schema


def _of_keywords(schema: dict[str, Any]) -> Iterator[str]:
    for keyword in _UNENFORCED:
        if keyword in schema:
            yield f"{keyword} is not supported"
    if schema.get("uniqueItems"):
        yield "uniqueItems is not supported"
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
        yield "$ref can only point into the schema itself, as #/..."
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "allOf of several schemas is not supported"
    yield from _of_neighbours(schema)
    yield from _of_strings(schema)


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
