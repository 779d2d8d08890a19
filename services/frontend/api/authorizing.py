"""Lets calls of a gRPC port through the gate. Health and reflection are exempt: probes and tools have no token.

It stands before every handler, so that a service that forgets to ask is closed and not open. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from frontend.access.gate import Gate
from stepwire.errors import StepwireError
from stepwire.grpc_errors import abort_with

# Quoted: generic for type checkers only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]

EXEMPT = ("/grpc.health.v1.Health/", "/grpc.reflection.")


class AuthorizingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for type checkers only
    """Ends a call without a good token before its request is read."""

    def __init__(self, gate: Gate, *, for_admin: bool = False) -> None:
        self._gate = gate
        self._for_admin = for_admin

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Handler | None = await continuation(handler_call_details)
        # None is gRPC's own "not served here"; what is no method cannot be called.
        if handler is None or handler_call_details.method.startswith(EXEMPT):
            return cast(Handler, handler)
        try:
            self._gate.identify(_authorization(handler_call_details), for_admin=self._for_admin)
        except StepwireError as error:
            return _refusing(handler, error)
        return handler


def _authorization(details: grpc.HandlerCallDetails) -> str:
    for key, value in details.invocation_metadata or ():
        if key == "authorization":
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""


def _refusing(handler: Any, error: StepwireError) -> Handler:
    """A handler of the same shape that only says no."""

    async def refuse(request: object, context: Context) -> None:
        await abort_with(context, error)

    kind = "unary_stream" if handler.response_streaming else "unary_unary"
    return cast(Handler, handler._replace(request_streaming=False, request_deserializer=None, **{kind: refuse}))
