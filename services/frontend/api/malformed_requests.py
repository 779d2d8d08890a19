"""Bytes that are no message of the called method: INVALID_ARGUMENT, instead of gRPC's UNKNOWN and a traceback each.

A stranger must be able neither to fill the log nor to look like a failure of ours. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from stepwire.errors import InvalidRequestError
from stepwire.grpc_errors import abort_with

# Quoted: generic for type checkers only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for type checkers only
    """Replaces the handler of a call whose request cannot be parsed; only calls with one request are looked at."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return cast(Handler, handler)
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        return cast(
            Handler,
            handler._replace(
                request_deserializer=_parse_or_none(handler.request_deserializer),
                **{kind: _refuse_none(getattr(handler, kind))},
            ),
        )


def _parse_or_none(parse: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def parse_or_none(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError:
            return None

    return parse_or_none


def _refuse_none(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def checked(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> object:
        if request is None:
            await abort_with(context, InvalidRequestError("the request is not a message of this method"))
        return await behaviour(request, context)

    return checked
