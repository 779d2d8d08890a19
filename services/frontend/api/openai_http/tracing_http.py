"""Server spans of the HTTP requests that generate, as `frontend.api.tracing` makes them of RPCs. Event loop only."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.trace import Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.api.openai_http.errors import CLIENT_CLOSED_REQUEST
from frontend.request_trace import start_request_span
from stepwire import tracing

# gen_ai.operation.name of each path that makes a span.
OPERATIONS: Mapping[str, str] = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
}
_SERVER_FAULT = 500


class TracingMiddleware:
    """Around the application; leaves every other path alone. `server_address` is what callers know this server by."""

    def __init__(self, app: ASGIApp, server_address: str) -> None:
        self._app = app
        self._server_address = server_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED_REQUEST

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with start_request_span(tracing.extract(_headers(scope)), _attributes(scope, self._server_address)) as span:
            try:
                await self._app(scope, receive, watched)
            finally:
                span.set_attribute("http.response.status_code", status)
                if status >= _SERVER_FAULT:
                    span.set_status(Status(StatusCode.ERROR))


def _headers(scope: Scope) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]


def _attributes(scope: Scope, server_address: str) -> dict[str, str]:
    client = scope.get("client")
    return {
        "gen_ai.operation.name": OPERATIONS[scope["path"]],
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "server.address": server_address,
        "client.address": client[0] if client else "",
    }
