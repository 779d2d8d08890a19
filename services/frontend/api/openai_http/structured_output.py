"""Constraints on the answer as OpenAI (response_format) and vLLM (structured_outputs, guided_*) write them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from stepwire.errors import InvalidRequestError
from stepwire.v1.common_pb2 import StructuredOutput

# (what the caller calls it, field of StructuredOutput, its value)
_Constraint = tuple[str, str, Any]


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)

    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's: exactly one is set."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


def read_structured_output(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, guided: StructuredOutputs
) -> tuple[StructuredOutput | None, dict[str, str]]:
    """The constraint, and its name by that of the gRPC field. Raises InvalidRequestError when there are several."""
    found = [
        *_of_response_format(response_format),
        *_of_outputs(structured or StructuredOutputs(), "structured_outputs."),
        *_of_outputs(guided, "guided_"),
    ]
    if not found:
        if structured is not None:
            raise InvalidRequestError.of_field("structured_outputs", "no kind of constraint is set")
        return None, {}
    if len(found) > 1:
        raise InvalidRequestError.of_field(found[1][0], f"contradicts {found[0][0]}; one constraint is allowed")
    [(name, kind, value)] = found
    return StructuredOutput(**{kind: value}), {f"structured_output.{kind}": name}


def _of_response_format(given: ResponseFormat | None) -> Iterator[_Constraint]:
    if given is None or given.type == "text":
        return
    if given.type == "json_object":
        yield "response_format", "json_object", StructuredOutput.JsonObject()
        return
    if given.json_schema is None or given.json_schema.json_schema is None:
        raise InvalidRequestError.of_field("response_format.json_schema.schema", "missing with type json_schema")
    yield "response_format.json_schema.schema", "json_schema", json.dumps(given.json_schema.json_schema)


def _of_outputs(given: StructuredOutputs, prefix: str) -> Iterator[_Constraint]:
    if given.json_schema is not None:
        yield f"{prefix}json", "json_schema", _as_text(given.json_schema)
    if given.regex is not None:
        yield f"{prefix}regex", "regex", given.regex
    if given.choice is not None:
        yield f"{prefix}choice", "choice", StructuredOutput.Choice(choices=given.choice)
    if given.grammar is not None:
        yield f"{prefix}grammar", "grammar", given.grammar
    if given.json_object:
        yield f"{prefix}json_object", "json_object", StructuredOutput.JsonObject()
    if given.structural_tag is not None:
        yield f"{prefix}structural_tag", "structural_tag", _as_text(given.structural_tag)


def _as_text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value)
