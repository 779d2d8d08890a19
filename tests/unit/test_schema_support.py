"""What can not be enforced is refused with its place, and nothing else is."""

from __future__ import annotations

import pytest

from engine_core.structured_output.schema_support import unenforced

INTEGER = {"type": "integer"}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog", "type": "string"}}, "required": ["kind"]}
PUP = {"type": "object", "properties": {"kind": {"const": "dog"}}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"not": INTEGER, "if": {"type": "string"}}, "required": ["not"]},
        {"enum": [{"not": 1}]},
        {"type": "string", "enum": ["a", "b"]},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "number", "const": 5},
        {"const": {"if": 1}, "description": "x", "title": "y"},
        {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}},
        {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": INTEGER}}},
        {"$ref": "#/nothing/here"},
        {"$ref": "#/$defs/a/anyOf/0/items", "$defs": {"a": {"anyOf": [{"type": "array", "items": INTEGER}]}}},
        {"anyOf": [INTEGER, {"type": "null"}], "default": None},
        {"allOf": [INTEGER]},
        {"type": "integer", "minimum": 1, "maximum": 5, "multipleOf": 2},
        {"type": "string", "pattern": "^[a-z]+$"},
        {"type": "string", "format": "date"},
        {"type": "array", "items": INTEGER, "uniqueItems": False},
        {"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": False},
        {"type": "string", "x-of-a-vendor": {"not": 1}},
        {"type": "integer", "multipleOf": 5},
        {"type": "integer", "minimum": -1000, "maximum": 1000, "multipleOf": 7},
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^[a-z]+$"}},
        {"oneOf": [INTEGER, {"type": "string"}, {"type": ["null", "array"]}]},
        {"oneOf": [{"const": 1}, {"enum": [2, 3]}]},
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
    ],
)
def test_enforced(schema: object) -> None:
    assert list(unenforced(schema)) == []


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"not": INTEGER}, "#: not is not supported"),
        ({"type": "array", "uniqueItems": True}, "#: uniqueItems is"),
        ({"type": "array", "items": {"not": {}}}, "#/items: not is"),
        ({"properties": {"a": {"if": {}}}}, "#/properties/a: if is"),
        ({"$defs": {"a": {"contains": {}}}}, "#/$defs/a: contains is"),
        ({"anyOf": [INTEGER, {"not": {}}]}, "#/anyOf/1: not is"),
        ({"allOf": [INTEGER, INTEGER]}, "#: allOf of several"),
        ({"anyOf": [INTEGER], "required": ["a"]}, "#: anyOf beside required"),
        ({"anyOf": [INTEGER], "type": "string"}, "#: anyOf beside type"),
        ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": INTEGER}}, "#: $ref beside minimum"),
        ({"$ref": "https://example.org/a"}, "#: $ref can only point into"),
        ({"$ref": "#name"}, "#: $ref can only point into"),
        ({"$ref": "#/a/b", "a": {"b": {"if": True}}}, "#/a/b: if is not supported"),
        ({"$ref": "#/a/b~1%20", "a": {"b/ ": {"$ref": "https://example.org"}}}, "#/a/b~1%20: $ref can only point into"),
        ({"items": {"$ref": "#/a/1"}, "a": [5, {"$ref": "#/b"}], "b": {"not": {}}}, "#/b: not is not supported"),
        ({"type": "string", "enum": ["a", 1]}, "#: enum beside type"),
        ({"type": "integer", "const": True}, "#: const beside type"),
        ({"minimum": 5}, "#: minimum without type"),
        ({"type": "number", "multipleOf": 0.5}, "#: multipleOf is supported for type integer"),
        ({"type": "object", "required": ["z"]}, "#: 'z' is required and not among"),
        ({"type": "object", "properties": {"x": {}}, "patternProperties": {"^x": {}}}, "#: patternProperties beside"),
        ({"type": "string", "format": "date", "maxLength": 3}, "#: format beside maxLength"),
        ({"type": "string", "format": "phone"}, "#: format 'phone' is"),
        ({"type": "string", "pattern": 'a"b'}, "#: a pattern with a quote"),
        ({"type": "string", "pattern": "^(?!admin)[a-z]+$"}, "#: a pattern with look-ahead"),
        ({"type": "string", "pattern": "a(?<=b)"}, "#: a pattern with look-ahead or look-behind"),
        ({"type": "string", "pattern": "(" * 201 + "a" + ")" * 201}, "#: a pattern with parentheses nested"),
        ({"type": "string", "pattern": "a?" * 501}, "#: a pattern with more than 500 quantifiers"),
        ({"type": "object", "patternProperties": {"(" * 201: {}}}, "#: a pattern with parentheses nested"),
        (
            {"propertyNames": {"pattern": "(?=a)", "type": "string"}, "type": "object"},
            "#/propertyNames: a pattern with",
        ),
        ({"type": "integer", "multipleOf": 5, "minimum": 0}, "#: multipleOf is supported for whole numbers"),
        ({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 2001}, "#: multipleOf is supported for whole"),
        ({"type": "integer", "multipleOf": 2.5}, "#: multipleOf is supported for whole numbers"),
        ({"minItems": 1}, "#: minItems without type"),
        ({"maxProperties": 1}, "#: maxProperties without type"),
        ({"patternProperties": {"^a": {}}}, "#: patternProperties without type"),
        (
            {"type": "object", "propertyNames": {"type": "string"}, "properties": {}},
            "#: propertyNames beside properties",
        ),
        ({"type": "object", "unevaluatedProperties": {"not": {}}}, "#/unevaluatedProperties: not is"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "#: oneOf is supported where"),
        ({"oneOf": [CAT, PUP]}, "#: oneOf is supported where"),
        ({"items": {"oneOf": [{}, {}]}, "type": "array"}, "#/items: oneOf is supported where"),
        ({"properties": {"\ud800": {"not": {}}}}, "#/properties/\\ud800: not is"),
    ],
)
def test_not_enforced(schema: object, problem: str) -> None:
    assert any(found.startswith(problem) for found in unenforced(schema)), list(unenforced(schema))
