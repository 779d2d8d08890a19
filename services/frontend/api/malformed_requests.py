"""Bytes that are no message of the called method: INVALID_ARGUMENT, instead of gRPC's UNKNOWN and a traceback each.

A stranger must be able neither to fill the log nor to look like a failure of ours. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from stepwire.errors import InvalidRequestError
from stepwire.grpc_errors import abort_with

# Quoted: generic for type checkers only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]


class MalformedRequestInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for type checkers only
    """Wraps every handler: what cannot be parsed is refused before, or in a stream when, the handler would see it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return cast(Handler, handler)
        if handler.request_streaming:
            # Reflection is the only one: an async generator.
            changes: dict[str, object] = {"stream_stream": _refuse_none_in_stream(handler.stream_stream)}
        else:
            kind = "unary_stream" if handler.response_streaming else "unary_unary"
            changes = {kind: _refuse_none(getattr(handler, kind))}
        parse = _parse_or_none(handler.request_deserializer)
        return cast(Handler, handler._replace(request_deserializer=parse, **changes))


def _parse_or_none(parse: Callable[[bytes], object]) -> Callable[[bytes], object]:
    def parse_or_none(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError:
            return None

    return parse_or_none


def _refuse_none(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def checked(request: object, context: Context) -> object:
        await _check(request, context)
        return await behaviour(request, context)

    return checked


def _refuse_none_in_stream(behaviour: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def checked(requests: AsyncIterator[object], context: Context) -> AsyncIterator[Any]:
        async def check_each() -> AsyncIterator[object]:
            async for request in requests:
                await _check(request, context)
                yield request

        async for response in behaviour(check_each(), context):
            yield response

    return checked


async def _check(request: object, context: Context) -> None:
    if request is None:
        await abort_with(context, InvalidRequestError("the request is not a message of this method"))
