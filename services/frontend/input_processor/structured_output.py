"""The structured-output part of a request: what can be said of a constraint without compiling it.

Whether it compiles is the engine's to say: it has the vocabulary. Runs on the event loop, hence the limits.
"""

from __future__ import annotations

import json

from frontend.input_processor.field_checks import FieldChecks
from stepwire.v1 import common_pb2

# Parsed on the event loop, and compiled in a time that grows faster than the text.
MAX_TEXT_CHARS = 256 * 1024
MAX_CHOICES = 10_000


def check_structured_output(given: common_pb2.StructuredOutput, checks: FieldChecks) -> None:
    """Present, of bearable size, and JSON where it has to be."""
    kind = given.WhichOneof("spec")
    field = f"structured_output.{kind}"
    match kind:
        case None:
            checks.add("structured_output.spec", "no kind of constraint is set")
        case "json_object":
            pass
        case "choice":
            _check_choices(f"{field}.choices", list(given.choice.choices), checks)
        case _:
            _check_text(kind, field, getattr(given, kind), checks)


def _check_text(kind: str, field: str, text: str, checks: FieldChecks) -> None:
    if not checks.require(bool(text), field, "the text is empty"):
        return
    is_small = _check_size(field, len(text), checks)
    if is_small and kind == "json_schema":
        _check_json(field, text, (dict, bool), "an object or a boolean", checks)
    elif is_small and kind == "structural_tag":
        _check_json(field, text, (dict,), "an object", checks)


def _check_json(field: str, text: str, types: tuple[type, ...], names: str, checks: FieldChecks) -> None:
    try:
        value = json.loads(text)
    except ValueError as error:
        checks.add(field, f"not JSON: {error}")
    except RecursionError:
        checks.add(field, "the JSON is nested too deeply")
    else:
        checks.require(isinstance(value, types), field, f"the JSON is not {names}")


def _check_choices(field: str, choices: list[str], checks: FieldChecks) -> None:
    num = len(choices)
    if not checks.require(1 <= num <= MAX_CHOICES, field, f"{num} choices, outside 1..{MAX_CHOICES}"):
        return
    _check_size(field, sum(map(len, choices)), checks)
    if "" in choices:
        checks.add(f"{field}[{choices.index('')}]", "the string is empty")


def _check_size(field: str, num_chars: int, checks: FieldChecks) -> bool:
    return checks.require(num_chars <= MAX_TEXT_CHARS, field, f"{num_chars} characters, at most {MAX_TEXT_CHARS}")
