"""Counts and times every HTTP request. Event loop only; changes nothing, but answers what no handler could."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.api.openai_http.errors import CLIENT_CLOSED_REQUEST
from frontend.metrics import UNKNOWN_METHOD, FrontendMetrics

logger = logging.getLogger(__name__)

# Names that only a stranger knows are no labels.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class CountingMiddleware:
    """Around the application: the route is known when it has ended."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = CLIENT_CLOSED_REQUEST
        started = time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            # Was logged, and answered if there was still time to.
            logger.debug("HTTP request ended with an exception", exc_info=True)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else UNKNOWN_METHOD
            handler = getattr(scope.get("route"), "path", UNKNOWN_METHOD)
            self._metrics.http_requests.labels(method, str(status), handler).inc()
            self._metrics.http_request_duration.labels(method, handler).observe(time.monotonic() - started)
