"""The ASGI application: its paths, the bodies and errors in the OpenAPI document, and the errors of HTTP itself.

Event loop only. Bodies are read by the handlers, not by FastAPI, which would parse large ones on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from frontend.api.openai_http.answering_http import error_response
from frontend.api.openai_http.chat_page_files import ChatPage
from frontend.api.openai_http.counting_http import CountingMiddleware
from frontend.api.openai_http.embedding_routes import EmbeddingRoutes
from frontend.api.openai_http.errors import CLIENT_CLOSED_REQUEST, ErrorBody, error_body, http_phrase
from frontend.api.openai_http.generation_routes import GenerationRoutes
from frontend.api.openai_http.service_routes import ServiceRoutes
from frontend.api.openai_http.tracing_http import TracingMiddleware
from frontend.llm_frontend import LLMFrontend
from frontend.metrics import FrontendMetrics
from stepwire import __version__
from stepwire.errors import RequestFailedError
from stepwire.listen_address import known_as

logger = logging.getLogger(__name__)


def build_app(frontend: LLMFrontend, metrics: FrontendMetrics, is_ready: Callable[[], bool]) -> CountingMiddleware:
    """Everything that is served over HTTP. `is_ready` is what /health says."""
    app = FastAPI(
        title="stepwire",
        version=__version__,
        summary="OpenAI-compatible API of a stepwire frontend",
        # Its own spans would stand between a caller's and ours.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    groups = (GenerationRoutes(frontend), EmbeddingRoutes(frontend), ServiceRoutes(frontend, is_ready))
    for routes in groups:
        app.include_router(routes.router)
    if frontend.settings.chat_page:
        app.mount("/chat", ChatPage())
    _describe_bodies(app, [*(body_type for routes in groups for body_type in routes.body_types), ErrorBody])
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    return CountingMiddleware(TracingMiddleware(app, known_as(frontend.settings.host)), metrics)


def _describe_bodies(app: FastAPI, body_types: list[Any]) -> None:
    """Put the schemas of the bodies, which FastAPI does not know, into the document."""
    standard = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = standard()
            modes = [(body_type, "validation") for body_type in body_types]
            _, schemas = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]  # the literal is lost
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend the document


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    if not isinstance(error, HTTPException):
        raise error
    phrase = http_phrase(error.status_code)
    code = phrase.replace(" ", "_")
    body = error_body(error.status_code, f"{phrase}: {request.method[:16]} {request.url.path[:128]}", None, code)
    return JSONResponse(body, error.status_code, error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _unexpected(request: Request, error: Exception) -> Response:
    logger.error("HTTP request failed", exc_info=error)
    return error_response(RequestFailedError("internal error of the frontend", reason="INTERNAL"))
