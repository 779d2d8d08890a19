"""Keeps the workers of a frontend: starts them, replaces those that die, lets them drain. Owner: the event loop.

It holds the ports that they share and serves the metrics port; it sees no request.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
import uuid

from frontend.config import FrontendSettings
from frontend.event_loop import loop_factory
from frontend.parent_watch import watch_parent
from frontend.role import Role
from frontend.workers.control_channel import Handler
from frontend.workers.relay import Relay
from frontend.workers.reserved_port import ReservedPort
from frontend.workers.settings_of_workers import settings_of
from frontend.workers.supervised_metrics import SupervisedMetrics
from frontend.workers.worker_handle import ALIVE_S, WorkerHandle
from stepwire import tracing
from stepwire.listen_address import BindError, join
from stepwire.metrics import serve_http
from stepwire.startup_trace import StartupTrace

logger = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
# A worker that has lived so long did not die of its start.
STABLE_S = 60.0
TICK_S = 1.0
# What stands for the exit code of a process that there never was.
SPAWN_FAILED = 1
# Beyond the delay and the drain, for last words, goodbyes and closing.
STOP_MARGIN_S = 30.0


def run(settings: FrontendSettings) -> int:
    """Until told to stop. The exit code is 1 when a port is not to be had, or no worker can be started."""
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_supervise(settings))
    except BindError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


async def _supervise(settings: FrontendSettings) -> int:
    supervisor = Supervisor(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.request_stop)
    if settings.owner == "parent":
        watch_parent(lambda: loop.call_soon_threadsafe(lambda: supervisor.request_stop(at_once=True)))
    return await supervisor.run()


class Supervisor:
    """`run` until `request_stop`, or until no worker can be started."""

    def __init__(self, settings: FrontendSettings) -> None:
        """Takes the ports. Raises BindError."""
        self._ports = [
            grpc_port := ReservedPort(settings.host, settings.port),
            *([ReservedPort(settings.host, settings.http_port)] if settings.http_port else ()),
        ]
        self._settings = settings.model_copy(update={"port": grpc_port.port})
        self._workers: dict[int, WorkerHandle] = {}
        self._relay = Relay(self._workers)
        self._metrics = SupervisedMetrics(self._workers, asyncio.get_running_loop())
        self._stop = asyncio.Event()
        self._is_hurried = False
        self._has_failed = False
        self._has_started = False
        self._end_tracing = tracing.start("stepwire-frontend", uuid.uuid4().hex, settings)
        self._startup_trace = StartupTrace()
        self._last_tick = time.monotonic()
        self._metrics_port, self._close_metrics = serve_http(
            settings.metrics_port,
            self._metrics.served(settings.metrics_alias),
            self._is_ready,
            self._is_alive,
            host=settings.host,
        )

    def request_stop(self, *, at_once: bool = False) -> None:
        """Let every worker drain; a second call, or `at_once`, ends the waiting. Never blocks."""
        is_first = not self._stop.is_set()
        self._is_hurried = self._is_hurried or at_once or not is_first
        self._stop.set()
        if is_first:
            logger.info("draining %d workers", len(self._workers))
        for worker in self._workers.values():
            worker.stop(at_once=self._is_hurried)

    async def run(self) -> int:
        """Serve; returns the exit code when every worker has ended."""
        ticking = asyncio.create_task(self._tick())
        keeping = [asyncio.create_task(self._keep(number)) for number in range(self._settings.workers)]
        await self._stop.wait()
        drain_s = self._settings.pre_stop_delay_s + self._settings.drain_timeout_s
        _, late = await asyncio.wait(keeping, timeout=drain_s + STOP_MARGIN_S)
        if late:
            logger.error("%d workers do not end and are killed", len(late))
            self._has_failed = True
            for worker in self._workers.values():
                worker.kill()
        await asyncio.gather(*keeping)
        ticking.cancel()
        await asyncio.to_thread(self._close_metrics)
        for port in self._ports:
            port.close()
        self._startup_trace.end(is_serving=False)
        await asyncio.to_thread(self._end_tracing)
        logger.info("stopped")
        return int(self._has_failed)

    def _is_ready(self) -> bool:
        """Connections go to every worker that listens, so all of these have to serve, and there has to be one."""
        listening = [worker for worker in list(self._workers.values()) if worker.is_listening]
        return not self._stop.is_set() and bool(listening) and all(worker.is_serving for worker in listening)

    def _is_alive(self) -> bool:
        return time.monotonic() - self._last_tick < ALIVE_S

    async def _tick(self) -> None:
        while True:
            self._last_tick = time.monotonic()
            await asyncio.sleep(TICK_S)

    async def _keep(self, number: int) -> None:
        """One worker after the other, until the end."""
        backoff_s, is_replacement = MIN_BACKOFF_S, False
        while not self._stop.is_set():
            began = time.monotonic()
            code = await self._run_worker(number, Role(number, is_worker=True, is_replacement=is_replacement))
            if self._stop.is_set():
                break
            if time.monotonic() - began > STABLE_S:
                backoff_s = MIN_BACKOFF_S
            logger.error("worker %d has ended with code %d; another one is started in %g s", number, code, backoff_s)
            await self._wait_for_stop(backoff_s)
            if not self._stop.is_set():
                self._metrics.restarts.inc()
            backoff_s, is_replacement = min(2 * backoff_s, MAX_BACKOFF_S), True

    async def _run_worker(self, number: int, role: Role) -> int:
        # What is started later, in the place of another, belongs to no start of the whole.
        environment = {} if self._has_started else self._startup_trace.environment
        try:
            worker = await WorkerHandle.start(role, settings_of(number, self._settings), environment)
        except OSError as error:
            # No memory, process or descriptor is free: this may pass, and another try is due as for one that died.
            logger.error("worker %d has no process: %s", number, error)
            self._judge(number, SPAWN_FAILED, has_listened=False)
            return SPAWN_FAILED
        self._workers[number] = worker
        logger.info("worker %d is process %d", number, worker.process.pid)
        if self._stop.is_set():
            worker.stop(at_once=self._is_hurried)
        has_listened = False

        async def on_listening(admin_port: int) -> None:
            nonlocal has_listened
            has_listened = True
            self._note_listening(worker, admin_port)

        async def on_serving(is_serving: bool) -> None:
            worker.is_serving = is_serving

        handlers: dict[str, Handler] = {
            "listening": on_listening,
            "serving": on_serving,
            **self._relay.handlers(number),
        }
        code = await worker.run(handlers)
        self._metrics.retire(worker)
        del self._workers[number]
        self._relay.forget(number)
        self._judge(number, code, has_listened=has_listened)
        return code

    def _note_listening(self, worker: WorkerHandle, admin_port: int) -> None:
        worker.is_listening = True
        self._relay.welcome(worker)
        if admin_port:
            # A replacement is to be found where the first one was.
            self._settings = self._settings.model_copy(update={"admin_port": admin_port})
        if not self._has_started and sum(one.is_listening for one in self._workers.values()) == self._settings.workers:
            self._has_started = True
            self._startup_trace.end(is_serving=True)
            self._say_where()

    def _say_where(self) -> None:
        settings = self._settings
        logger.info(
            "listening on %s, metrics on %s, admin on %s, HTTP on %s, with %d workers",
            join(settings.host, settings.port),
            join(settings.host, self._metrics_port),
            join(settings.admin_host, settings.admin_port),
            join(settings.host, settings.http_port) if settings.http_port else "no port",
            settings.workers,
        )

    def _judge(self, number: int, code: int, *, has_listened: bool) -> None:
        """A worker has ended. One that could not even start fails everything when no other one serves."""
        if self._stop.is_set():
            self._has_failed = self._has_failed or code != 0
        elif not has_listened and (not self._has_started or not self._workers):
            logger.error("worker %d could not be started: it has ended with code %d", number, code)
            self._has_failed = True
            self.request_stop(at_once=True)

    async def _wait_for_stop(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._stop.wait()
        except TimeoutError:
            pass
