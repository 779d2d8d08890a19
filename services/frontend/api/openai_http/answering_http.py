"""What every handler of the HTTP API does alike: errors become responses, headers become ids. Event loop only."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.responses import JSONResponse

from frontend.api.answering import request_id_of
from frontend.api.openai_http.call import HttpCall
from frontend.api.openai_http.errors import headers_of, status_of, to_body
from frontend.request_trace import set_error_type
from stepwire.errors import StepwireError

Routes = TypeVar("Routes")
Answer = Callable[[Any, HttpCall, str], Awaitable[Response]]


def answers_errors(handler: Answer) -> Callable[[Any, Request], Awaitable[Response]]:
    """Decorate a handler, which gets the call and its id: a StepwireError is a response in OpenAI's shape."""

    @functools.wraps(handler)
    async def answered(self: Any, request: Request) -> Response:
        call = HttpCall(request)
        request_id = uuid.uuid4().hex
        try:
            request_id = request_id_of("", call)
            response = await handler(self, call, request_id)
        except StepwireError as error:
            response = error_response(error)
        response.headers.setdefault("x-request-id", request_id)
        return response

    # FastAPI reads the parameters of what was wrapped.
    del answered.__wrapped__
    answered.__annotations__ = {"request": Request, "return": Response}
    return answered


def error_response(error: StepwireError) -> Response:
    set_error_type(error)
    return JSONResponse(to_body(error), status_of(error), headers_of(error))


def body_schema(body_type: type[BaseModel]) -> dict[str, Any]:
    """The part of the OpenAPI document about the body, and about errors, of one path."""
    schema = {"$ref": f"#/components/schemas/{body_type.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
