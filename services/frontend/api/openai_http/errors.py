"""Errors in OpenAI's shape: a status for each reason, a body with message, type, param and code, advice on retries.

Fields keep the names that the caller has used. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from grpc import StatusCode
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from frontend.input_processor.field_checks import MAX_VIOLATIONS
from stepwire.errors import FieldViolation, InvalidRequestError, StepwireError
from stepwire.grpc_errors import is_retryable, status_code

CLIENT_CLOSED_REQUEST = 499

_STATUS_OF_CODE = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.OUT_OF_RANGE: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.ABORTED: 409,
    StatusCode.FAILED_PRECONDITION: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: CLIENT_CLOSED_REQUEST,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
_STATUS_OF_REASON = {"KV_CAPACITY": 400, "BODY_TOO_LARGE": 413}
# What clients of OpenAI look at beside the status.
_TYPE_OF_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# Groups of GenerateRequest whose fields stand at the top of a body.
_GROUP = re.compile(r"\b(?:sampling|stop|output|kv)\.(?=[a-z_])")
_RENAMED = {"token_ids.ids": "prompt", "token_ids": "prompt", "text": "prompt", "request_id": "x-request-id"}
_RENAMED |= {"texts": "prompt", "sequences[0].ids": "tokens", "sequences": "tokens"}


class ErrorObject(BaseModel):
    """For the OpenAPI document: what `error_body` makes."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorObject


def status_of(error: StepwireError) -> int:
    """The HTTP status of an error, by its reason."""
    return _STATUS_OF_REASON.get(error.reason) or _STATUS_OF_CODE.get(status_code(error.reason), 500)


def to_body(error: StepwireError, names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """OpenAI's error object. `names`: fields of the gRPC message -> what the caller calls them."""
    renamed = [_rename(violation, {**_RENAMED, **(names or {})}) for violation in error.violations]
    message = "; ".join(f"{item.field}: {item.description}" for item in renamed) or error.message
    return error_body(status_of(error), message, renamed[0].field if renamed else None, error.reason.lower())


def error_body(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    """The same for errors that only HTTP knows."""
    kind = _TYPE_OF_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def headers_of(error: StepwireError) -> dict[str, str]:
    """When, and whether at all, to try again; the latter is read by OpenAI's own clients."""
    headers = {"x-should-retry": str(is_retryable(error)).lower()}
    if error.retry_after_ms:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    return headers


def invalid_body(error: ValidationError) -> InvalidRequestError:
    """What is wrong with a body, field by field, without anything that stands in it."""
    errors = error.errors(include_input=False, include_url=False)
    # The branches of a union are reported one by one; where a list is too long for its own, the others say nothing.
    errors = [item for item in errors if item["type"] == _TOO_LONG] or errors
    found = {_path(item["loc"]): _what_is_wrong(item) for item in reversed(errors)}
    violations = tuple(FieldViolation(field, text) for field, text in reversed(found.items()) if field)
    if violations:
        return InvalidRequestError("the body is not valid", violations=violations[:MAX_VIOLATIONS])
    return InvalidRequestError(f"the body is not valid: {'; '.join(found.values())}")


def _what_is_wrong(item: ErrorDetails) -> str:
    return f"at most {item['ctx']['max_length']} entries are allowed" if item["type"] == _TOO_LONG else item["msg"]


def http_phrase(status: int) -> str:
    return HTTPStatus(status).phrase.lower()


def _rename(violation: FieldViolation, names: Mapping[str, str]) -> FieldViolation:
    description = _GROUP.sub("", violation.description)
    for name in sorted(names, key=len, reverse=True):
        rest = violation.field.removeprefix(name)
        if violation.field.startswith(name) and rest[:1] in ("", "[", "."):
            return FieldViolation(names[name] + rest, description)
    return FieldViolation(_GROUP.sub("", violation.field), description)


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`, without the names that pydantic gives to branches of unions."""
    path = ""
    for part in _named(location):
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def _named(location: tuple[int | str, ...]) -> Iterator[int | str]:
    for position, part in enumerate(location):
        # A field comes first, or behind a field; what else there is has brackets, capitals, or the name of a type.
        if isinstance(part, int) or position == 0 or (part.islower() and part.isidentifier() and part not in _TYPES):
            yield part


_TOO_LONG = "too_long"
_TYPES = frozenset({"str", "int", "float", "bool", "list", "dict"})
