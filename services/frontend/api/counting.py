"""Counts every RPC of the public server, health and reflection included. Changes nothing about any of them.

Runs on the event loop. Methods that nobody serves share one label, or a stranger could fill the registry with names.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from frontend.metrics import UNKNOWN_METHOD, FrontendMetrics

# Quoted: generic for type checkers only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]


class CountingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for type checkers only
    """Calls begun and ended, how long they took, their messages and bytes."""

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
        counting = {kind: wrap(behaviour, method), **self._metered(handler, method)}
        return cast(Handler, cast(Any, handler)._replace(**counting))

    def _metered(self, handler: Handler, method: str) -> dict[str, Callable[..., Any]]:
        """What makes messages of bytes and bytes of messages; a handler without either works on bytes."""
        traffic, found = self._metrics.rpc_traffic, {}
        if handler.request_deserializer is not None:
            found["request_deserializer"] = traffic.of(method, "in").deserializer(handler.request_deserializer)
        if handler.response_serializer is not None:
            found["response_serializer"] = traffic.of(method, "out").serializer(handler.response_serializer)
        return found

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
        ending, began = _Ending(), time.monotonic()
        try:
            yield
            ending.code = _code_of(context)
        except (asyncio.CancelledError, GeneratorExit):
            ending.code = _code_of(context) if context.done() else _code_of_cancel(context)
            raise
        except grpc.aio.AbortError:
            ending.code = _code_of(context)
            raise
        finally:
            self._metrics.rpcs_handled.labels(method, ending.code.name).inc()
            self._metrics.rpc_duration.labels(method, ending.code.name).observe(time.monotonic() - began)


@dataclasses.dataclass(slots=True)
class _Ending:
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN


def _code_of_cancel(context: Context) -> grpc.StatusCode:
    """The deadline cancels the handler just as the caller does."""
    return grpc.StatusCode.DEADLINE_EXCEEDED if context.time_remaining() == 0 else grpc.StatusCode.CANCELLED


def _code_of(context: Context) -> grpc.StatusCode:
    """The code a handler has set; the context has an integer, and 0 when nothing was set."""
    value: Any = context.code()
    if isinstance(value, grpc.StatusCode):
        return value
    return next((code for code in grpc.StatusCode if code.value[0] == value), grpc.StatusCode.OK)
