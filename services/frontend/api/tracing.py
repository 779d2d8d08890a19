"""Server spans of the RPCs that generate: `llm_request`, the child of the caller's span, around the whole handler.

OpenTelemetry's own interceptor does not know grpc.aio. Everything below the handler finds the span as the current one;
where nothing is exported it is a no-op that still carries the caller's context to the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

import grpc
import grpc.aio
from opentelemetry.trace import Status, StatusCode

from frontend.api.rpc_ending import RpcEnding, watch_ending
from frontend.request_trace import start_request_span
from stepwire import tracing

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]

# gen_ai.operation.name of each method that makes a span.
OPERATIONS: Mapping[str, str] = {
    "/stepwire.v1.GenerationService/Generate": "text_completion",
    "/stepwire.v1.GenerationService/GenerateStream": "text_completion",
    "/stepwire.v1.ChatService/Chat": "chat",
    "/stepwire.v1.ChatService/ChatStream": "chat",
    "/stepwire.v1.EmbeddingService/Embed": "embeddings",
    "/vllm.grpc.engine.VllmEngine/Generate": "text_completion",
    "/vllm.grpc.engine.VllmEngine/Embed": "embeddings",
}
# What a server is to blame for, in OpenTelemetry's conventions; the others are the caller's.
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


class TracingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic for type checkers only
    """Leaves every other method alone. `server_address` is what callers know this server by."""

    def __init__(self, server_address: str) -> None:
        self._server_address = server_address

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method not in OPERATIONS:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour = getattr(handler, kind)

        async def traced(request: object, context: Context) -> object:
            with _span(method, context, self._server_address):
                return await behaviour(request, context)

        # A handler is a named tuple, which the stubs do not know.
        return cast(Handler, cast(Any, handler)._replace(**{kind: traced}))


def address_of(peer: str) -> str:
    """The address in what gRPC calls a peer, without kind and port; as it is where it has none."""
    kind, _, rest = peer.partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


@contextmanager
def _span(method: str, context: Context, server_address: str) -> Iterator[None]:
    service, _, name = method.removeprefix("/").partition("/")
    attributes = {
        "gen_ai.operation.name": OPERATIONS[method],
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": name,
        "server.address": server_address,
        "client.address": address_of(context.peer()),
    }
    parent = tracing.extract(context.invocation_metadata() or ())
    ending = RpcEnding()
    with start_request_span(parent, attributes) as span:
        try:
            with watch_ending(context, ending):
                yield
        finally:
            span.set_attribute("rpc.grpc.status_code", ending.code.value[0])
            if ending.code in _SERVER_FAULTS:
                span.set_status(Status(StatusCode.ERROR))
