"""Values of google.protobuf.Struct as a template and a JSON schema need them. Pure."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format, struct_pb2

from frontend.input_processor.field_checks import FieldChecks


def to_dict(struct: struct_pb2.Struct, field: str, checks: FieldChecks) -> dict[str, Any]:
    """Keys in alphabetical order, because a Struct has none and prompts must repeat; whole numbers as integers.

    Empty when a number in it is not finite, which JSON does not have: `checks` then has a violation of `field`.
    """
    try:
        plain = _plain(json_format.MessageToDict(struct))
    # Which of them is a matter of the library's version.
    except (ValueError, json_format.SerializeToJsonError):
        checks.add(field, "a number in it is not finite")
        return {}
    return plain if isinstance(plain, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    # A Struct knows doubles only, and "minItems": 1.0 is neither what was meant nor what a template should show.
    return int(value) if isinstance(value, float) and value.is_integer() else value
