"""Counts every RPC of the public server, health and reflection included. Changes nothing about any of them.

Runs on the event loop. Methods that nobody serves share one label, or a stranger could fill the registry with names.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from frontend.api.rpc_ending import RpcEnding, watch_ending
from frontend.metrics import UNKNOWN_METHOD, FrontendMetrics

# Quoted: generic for type checkers only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]


class CountingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for type checkers only
    """rpcs_started_total and rpcs_handled_total."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Handler | None = await continuation(handler_call_details)
        if handler is None:
            self._metrics.rpcs_started.labels(UNKNOWN_METHOD).inc()
            self._metrics.rpcs_handled.labels(UNKNOWN_METHOD, grpc.StatusCode.UNIMPLEMENTED.name).inc()
            # None is gRPC's own "not served here".
            return cast(Handler, handler)
        return self._wrap(handler, handler_call_details.method)

    def _wrap(self, handler: Handler, method: str) -> Handler:
        kind = next(
            name
            for name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
            if getattr(handler, name) is not None
        )
        behaviour = getattr(handler, kind)
        wrap = self._count_generator if inspect.isasyncgenfunction(behaviour) else self._count_coroutine
        # A handler is a named tuple, which the stubs do not know.
        return cast(Handler, cast(Any, handler)._replace(**{kind: wrap(behaviour, method)}))

    def _count_coroutine(self, behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        async def counted(request: object, context: Context) -> object:
            with self._counting(method, context):
                return await behaviour(request, context)

        return counted

    def _count_generator(
        self, behaviour: Callable[..., AsyncIterator[Any]], method: str
    ) -> Callable[..., AsyncIterator[Any]]:
        async def counted(request: object, context: Context) -> AsyncIterator[Any]:
            with self._counting(method, context):
                async for response in behaviour(request, context):
                    yield response

        return counted

    @contextmanager
    def _counting(self, method: str, context: Context) -> Iterator[None]:
        self._metrics.rpcs_started.labels(method).inc()
        ending = RpcEnding()
        try:
            with watch_ending(context, ending):
                yield
        finally:
            self._metrics.rpcs_handled.labels(method, ending.code.name).inc()
