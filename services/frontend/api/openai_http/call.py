"""One HTTP request as the rest of the frontend sees a call: its headers stand for gRPC metadata, its body is checked.

A body costs time and memory before anything is known of it, so nobody's is read without a token that is known here.
Owner: the task of the request, on the event loop.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from frontend.access.gate import Gate
from frontend.api.answering import caller_of, client_class_of
from frontend.api.openai_http.errors import invalid_body
from stepwire.errors import InvalidRequestError

Body = TypeVar("Body", bound=BaseModel)

# A prompt of a million tokens fits, as text or as ids; parsing holds the interpreter, so there is no more room.
MAX_BODY_BYTES = 8 * 1024 * 1024
# A few milliseconds of parsing; beyond, other streams would notice.
MAX_BYTES_ON_LOOP = 256 * 1024


class HttpCall:
    """Has what `frontend.api.answering` reads of a gRPC call."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._metadata = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def path_parameter(self, name: str) -> str:
        return str(self._request.path_params[name])

    async def read(self, body_type: type[Body], gate: Gate) -> Body:
        """The body. Raises AccessError before any of it is read; InvalidRequestError names what is wrong with it."""
        gate.identify(caller_of(self), client_class_of(self))
        body = await self._read_bytes()
        if len(body) > MAX_BYTES_ON_LOOP:
            return await asyncio.to_thread(_parse, body_type, body)
        return _parse(body_type, body)

    async def _read_bytes(self) -> bytes:
        stated = self._request.headers.get("content-length", "")
        if stated.isdecimal() and int(stated) > MAX_BODY_BYTES:
            raise _too_large()
        parts: list[bytes] = []
        num_bytes = 0
        async for part in self._request.stream():
            num_bytes += len(part)
            if num_bytes > MAX_BODY_BYTES:
                raise _too_large()
            parts.append(part)
        return b"".join(parts)


def _parse(body_type: type[Body], body: bytes) -> Body:
    try:
        return body_type.model_validate_json(body)
    except ValidationError as error:
        # Not chained: its text would quote the body.
        raise invalid_body(error) from None


def _too_large() -> InvalidRequestError:
    return InvalidRequestError(
        f"the body is larger than {MAX_BODY_BYTES} bytes", reason="BODY_TOO_LARGE", retryable=False
    )
