"""Which parts of JSON Schema can not be enforced: the compiler would pass over them, and the answer break the schema.

A constraint that would be silently dropped is refused instead, with the place where it stands. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard
from urllib.parse import unquote

from engine_core.structured_output.regex_support import unsupported_in_regex
from engine_core.structured_output.schema_branches import are_disjoint

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
    "additionalItems",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "maximum",
    "maxItems",
    "maxLength",
    "maxProperties",
    "minimum",
    "minItems",
    "minLength",
    "minProperties",
    "multipleOf",
    "pattern",
    "patternProperties",
    "propertyNames",
)
# Of a schema with one of these the compiler reads nothing else.
_STAND_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_CONSTRAINTS = frozenset(
    {*_STAND_ALONE, *_NEED_TYPE, "additionalProperties", "items", "prefixItems", "properties", "required", "type",
     "unevaluatedItems", "unevaluatedProperties"}
)  # fmt: skip
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "relative-json-pointer",
     "time", "uri", "uri-reference", "uri-template", "uuid"}
)  # fmt: skip
_OF_SCHEMAS = ("$defs", "definitions", "patternProperties", "properties")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = (
    "additionalItems", "additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties"
)  # fmt: skip
# Multiples are listed one by one in a range that is closed and not wider; in others they are passed over.
_MAX_RANGE_OF_MULTIPLES = 2000


def unenforced(schema: Any) -> Iterator[str]:
    """Each place of a parsed schema that could not be enforced, in words. Raises RecursionError for absurd depth."""
    seen: set[int] = set()
    yield from _of_schema(schema, "#", seen)
    # Most point at what has been seen; others may point anywhere, as to `#/components/schemas/NAME`.
    for reference in dict.fromkeys(_references(schema)):
        yield from _of_schema(_target(schema, reference), reference, seen)
    for path, branches in _one_ofs(schema, "#"):
        if not are_disjoint([_resolved(schema, branch) for branch in branches]):
            yield f"{path}: oneOf is supported where types, or the const of a required property, tell its parts apart"


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
                yield from _of_schema(part, f"{path}/{name}/{_quoted(key)}", seen)
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


def _one_ofs(part: Any, path: str) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(part, dict):
        if isinstance(part.get("oneOf"), list):
            yield path, part["oneOf"]
        for key, inner in part.items():
            yield from _one_ofs(inner, f"{path}/{_quoted(key)}")
    elif isinstance(part, list):
        for index, inner in enumerate(part):
            yield from _one_ofs(inner, f"{path}/{index}")


def _resolved(schema: Any, part: Any) -> Any:
    """What stands there, behind one reference."""
    reference = part.get("$ref") if isinstance(part, dict) else None
    return _target(schema, reference) if isinstance(reference, str) and reference.startswith("#/") else part


def _quoted(name: str) -> str:
    """In a text that can be sent: JSON can spell halves of characters."""
    return name.encode(errors="backslashreplace").decode()


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
                yield f"{_quoted(repr(name))} is required and not among the properties"
    if "patternProperties" in schema and "properties" in schema:
        yield "patternProperties beside properties is not supported"
    if "multipleOf" in schema and schema.get("type") != "integer":
        yield "multipleOf is supported for type integer only"
    elif "multipleOf" in schema and not _lists_multiples(schema):
        yield (
            "multipleOf is supported for whole numbers, alone or with minimum and maximum that are no more than "
            f"{_MAX_RANGE_OF_MULTIPLES} apart"
        )
    beside = [name for name in ("properties", "patternProperties", "additionalProperties") if name in schema]
    if "propertyNames" in schema and beside:
        yield f"propertyNames beside {' and '.join(beside)} is not supported"


def _lists_multiples(schema: dict[str, Any]) -> bool:
    if not _is_whole(schema["multipleOf"]) or "exclusiveMinimum" in schema or "exclusiveMaximum" in schema:
        return False
    if "minimum" not in schema and "maximum" not in schema:
        return True
    low, high = schema.get("minimum"), schema.get("maximum")
    return _is_whole(low) and _is_whole(high) and high - low <= _MAX_RANGE_OF_MULTIPLES


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


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
        yield f"format {_quoted(repr(schema['format']))} is not supported"
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str):
            yield from _of_pattern(pattern)


def _of_pattern(pattern: str) -> Iterator[str]:
    # Patterns are matched against the JSON text, where a quote and a backslash need an escape.
    if '"' in pattern or "\\\\" in pattern:
        yield "a pattern with a quote or a backslash in it is not supported"
    for problem in unsupported_in_regex(pattern):
        yield f"a pattern with {problem} is not supported"
