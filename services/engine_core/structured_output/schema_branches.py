"""Whether no value can satisfy two of several schemas: then `oneOf` means what the compiler makes of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

_TYPES = frozenset({"array", "boolean", "null", "number", "object", "string"})


def are_disjoint(branches: Sequence[Any]) -> bool:
    """By their types, their const or enum, or those of a property that both require; False where it is not certain."""
    return all(_differ(one, other) for one, other in combinations(branches, 2))


def _differ(one: Any, other: Any) -> bool:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    if not _types(one) & _types(other) or _have_other_values(one, other):
        return True
    shared = _required_properties(one).keys() & _required_properties(other).keys()
    return any(_have_other_values(_required_properties(one)[key], _required_properties(other)[key]) for key in shared)


def _have_other_values(one: Any, other: Any) -> bool:
    values = _values(one), _values(other)
    return values[0] is not None and values[1] is not None and not values[0] & values[1]


def _types(schema: dict[str, Any]) -> frozenset[str]:
    named = schema.get("type", [])
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not names:
        return _TYPES
    # Every integer is a number.
    return frozenset("number" if name == "integer" else str(name) for name in names)


def _values(schema: Any) -> set[str] | None:
    """The values it names, as text; None when it does not."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {_text(schema["const"])}
    return {_text(value) for value in schema["enum"]} if isinstance(schema.get("enum"), list) else None


def _text(value: Any) -> str:
    # 1 and 1.0 are one value.
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True)


def _required_properties(schema: dict[str, Any]) -> dict[str, Any]:
    required, properties = schema.get("required"), schema.get("properties")
    if not (isinstance(required, list) and isinstance(properties, dict) and schema.get("type") == "object"):
        return {}
    return {key: properties[key] for key in required if isinstance(key, str) and key in properties}
