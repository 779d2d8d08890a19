"""The life of a frontend process: start, health, and the order of an orderly end. Owner: the event loop.

Signals and the end of the parent only call `request_stop`; everything that takes time happens in `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Coroutine

from frontend.admin_server import AdminServer
from frontend.config import FrontendSettings
from frontend.drain import FrontendDrain
from frontend.engine_client.connection_state import ClientIdentity
from frontend.garbage import GarbageDuty
from frontend.http_server import HttpServer
from frontend.llm_frontend import LLMFrontend
from frontend.metrics import FrontendMetrics
from frontend.peers import NoPeers, Peers
from frontend.role import SINGLE, Role
from frontend.server import PublicServer
from stepwire import log, tracing
from stepwire.certificate_expiry import watch_expiry
from stepwire.lag import watch_loop_lag
from stepwire.listen_address import join
from stepwire.metrics import serve_http
from stepwire.startup_trace import StartupTrace

logger = logging.getLogger(__name__)

TICK_S = 1.0
# The event loop is stuck, not busy, when it has not ticked for this long.
ALIVE_S = 60.0
# Handlers that were cut still have to write their status.
LAST_WORDS_S = 5.0
SERVER_GRACE_S = 5.0
# A worker that takes another's place listens without an engine after this long.
ATTACH_FIRST_S = 10.0


class FrontendProcess:
    """`start`, then `run` until somebody has called `request_stop`. Everything is released when `run` returns."""

    def __init__(
        self,
        settings: FrontendSettings,
        peers: Peers | None = None,
        role: Role = SINGLE,
        on_serving: Callable[[bool], None] = lambda is_serving: None,
    ) -> None:
        self._settings = settings
        self._role = role
        self._on_serving = on_serving
        peers = peers or NoPeers()
        identity = ClientIdentity(
            client_id=settings.client_id or socket.gethostname(),
            session_id=uuid.uuid4().hex,
            expect_model=settings.expect_model,
            tls=settings.engine_tls,
            tls_server_name=settings.engine_tls_server_name,
        )
        log.identify_process(instance_id=identity.session_id)
        self._end_tracing = tracing.start("stepwire-frontend", identity.session_id, settings)
        self._startup_trace = StartupTrace()
        self.metrics = FrontendMetrics()
        if settings.tls is not None and settings.tls.cert is not None:
            self.metrics.watch_certificate(watch_expiry(settings.tls.cert))
        self._changed = asyncio.Event()
        self.frontend = LLMFrontend(settings, identity, self.metrics, self._changed.set, peers)
        self.server = PublicServer(
            self.frontend,
            self.metrics,
            enable_reflection=settings.enable_reflection,
            shares_port=role.is_worker,
        )
        self.drain = FrontendDrain(self.frontend, settings.drain_timeout_s)
        self.admin_server = (
            AdminServer(self.frontend, self.drain, self.metrics, peers, enable_reflection=settings.enable_reflection)
            if role.has_admin_port
            else None
        )
        self.http_server = (
            HttpServer(self.frontend, self.metrics, self._is_ready, SERVER_GRACE_S, settings.tls)
            if settings.http_port
            else None
        )
        self.port = 0
        self.admin_port = 0
        self.metrics_port = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._is_serving = False
        self._garbage = GarbageDuty()
        self._last_tick = time.monotonic()

    async def start(self) -> None:
        """Listen, and begin to connect to the engines. Raises BindError before anything else has happened."""
        self._startup_trace.begin("connect")
        if self._role.is_replacement:
            await self._attach_first()
        self._bind()
        await self.server.start()
        if self.admin_server is not None:
            await self.admin_server.start()
        if not self._role.is_replacement:
            self.frontend.start()
        self.metrics.process.start()
        self._background = [
            asyncio.create_task(self._publish_health()),
            asyncio.create_task(self._tick()),
            asyncio.create_task(watch_loop_lag(self.metrics.process.lag)),
        ]
        if self.http_server is not None:
            self._background.append(self.http_server.start())
        if not self._role.is_worker:
            self._say_where()

    def _bind(self) -> None:
        settings, shares_port = self._settings, self._role.is_worker
        self.port = self.server.bind(settings.host, settings.port, settings.tls)
        if self.admin_server is not None:
            self.admin_port = self.admin_server.bind(settings.admin_host, settings.admin_port, settings.tls)
        if self.http_server is not None:
            self.http_server.bind(settings.host, settings.http_port, shares_port=shares_port)
        if not self._role.is_worker:
            self.metrics_port, self._close_metrics = serve_http(
                settings.metrics_port,
                self.metrics.served(settings.metrics_alias),
                self._is_ready,
                lambda: time.monotonic() - self._last_tick < ALIVE_S,
                host=settings.host,
            )

    async def _attach_first(self) -> None:
        """Others serve meanwhile: callers go to them until this one has an engine."""
        self.frontend.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTACH_FIRST_S):
                while not (self.frontend.is_serving or self._stop.is_set()):
                    await self._changed.wait()
                    self._changed.clear()

    def _say_where(self) -> None:
        logger.info(
            "listening on %s, metrics on %s, admin on %s, HTTP on %s",
            join(self._settings.host, self.port),
            join(self._settings.host, self.metrics_port),
            join(self._settings.admin_host, self.admin_port),
            join(self._settings.host, self._settings.http_port) if self.http_server is not None else "no port",
        )

    def request_stop(self, *, at_once: bool = False) -> None:
        """Begin the drain; a second call, or `at_once`, ends the waiting. Never blocks."""
        if self._hurry.is_set():
            logger.info("already shutting down")
        elif self._stop.is_set() or at_once:
            self._hurry.set()
        self._stop.set()
        self._changed.set()

    def freeze_garbage(self) -> None:
        """Everything that lives as long as the process is there; for the owner of the interpreter."""
        self._garbage.begin(time.monotonic())

    async def run(self) -> None:
        """Serve until asked to stop, then drain and release everything."""
        await self._wait_for_stop()
        logger.info("draining: up to %g s for running requests", self._settings.drain_timeout_s)
        await self.server.health.enter_graceful_shutdown()
        # Endpoint lists need time to forget this process; until then it still serves.
        await self._wait_unless_hurried(asyncio.Event().wait(), self._settings.pre_stop_delay_s)
        self.frontend.begin_drain()
        await self._wait_unless_hurried(self.frontend.wait_idle(), self._settings.drain_timeout_s)
        self.frontend.cut_all()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.frontend.wait_idle(), LAST_WORDS_S)
        await self.frontend.close()
        self.drain.close()
        if self.admin_server is not None:
            await self.admin_server.stop(SERVER_GRACE_S)
        await self.server.stop(SERVER_GRACE_S)
        if self.http_server is not None:
            await self.http_server.stop()
        for task in self._background:
            task.cancel()
        await asyncio.wait(self._background)
        if not self._role.is_worker:
            self._close_metrics()
        self.metrics.process.stop()
        self._startup_trace.end(is_serving=False)
        # It sends what is left, and may have to wait for the receiver.
        await asyncio.to_thread(self._end_tracing)
        logger.info("stopped")

    def _is_ready(self) -> bool:
        return self._is_serving and not self._stop.is_set()

    async def _wait_for_stop(self) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait({stopping, *self._background}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done:
            # Without its background work the process would lie about itself: better to end with the traceback.
            task.result()

    async def _wait_unless_hurried(self, what: Coroutine[object, object, object], timeout_s: float) -> None:
        waiting = {asyncio.ensure_future(what), asyncio.ensure_future(self._hurry.wait())}
        _, pending = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()

    async def _publish_health(self) -> None:
        while True:
            is_serving = self.frontend.is_serving
            if is_serving != self._is_serving:
                self._is_serving = is_serving
                logger.info("now %s", "SERVING" if is_serving else "NOT_SERVING")
                self._startup_trace.end(is_serving=True)
                await self.server.set_serving(is_serving)
                self._on_serving(is_serving)
            await self._changed.wait()
            self._changed.clear()

    async def _tick(self) -> None:
        """Regular work: clients that do not read, tokens that have changed, garbage; and prove that the loop runs."""
        while True:
            self._last_tick = time.monotonic()
            self.frontend.cut_slow_clients()
            self.frontend.refresh_tokens()
            self._garbage.tick(self._last_tick, is_idle=self.frontend.num_in_flight == 0)
            await asyncio.sleep(min(TICK_S, self._settings.slow_client_timeout_s / 4))
