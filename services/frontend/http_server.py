"""The HTTP server: uvicorn on the frontend's own event loop, with the OpenAI-compatible API. Owner: the event loop.

Signals and logging stay the frontend's. It has no access log: paths and statuses are in the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from frontend.api.openai_http.app import build_app
from frontend.llm_frontend import LLMFrontend
from frontend.metrics import FrontendMetrics
from stepwire.listen_address import bind_error
from stepwire.tls import TlsFiles, server_context

# Longer than clients keep an idle connection, so that none is closed while a request is on its way.
KEEP_ALIVE_S = 75
BACKLOG = 2048


class HttpServer:
    """`bind`, `start`, `stop`, as the gRPC servers."""

    def __init__(
        self,
        frontend: LLMFrontend,
        metrics: FrontendMetrics,
        is_ready: Callable[[], bool],
        grace_s: float,
        tls: TlsFiles | None,
    ) -> None:
        config = uvicorn.Config(
            build_app(frontend, metrics, is_ready),
            # Bounds the size of headers, which httptools does not.
            http="h11",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(grace_s),
        )
        config.load()
        # Of our own, because uvicorn's does not look at the files again.
        config.ssl = server_context(tls) if tls is not None else None
        # Strangers' malformed requests, and clients that are cut; what is ours is logged by the application.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Listen, with the other workers if there are any; returns the port. Raises BindError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise bind_error(host, port) from None
        bound: int = self._socket.getsockname()[1]
        return bound

    def start(self) -> asyncio.Task[None]:
        """Answer from now on; the task ends with the server."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        return self._serving

    async def stop(self) -> None:
        """Close the listener and idle connections; what still runs after the grace is cancelled."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process that this is a part of."""
        yield
