"""Both services as real processes on free ports, as `make run` starts them, and load on them."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psutil

from bench import engine_flags
from launcher import children, services
from launcher import options as launcher_options
from launcher.children import Child
from launcher.preflight import HOST
from stepwire import settings
from stepwire_client import Client
from stepwire_client.load.grpc_target import GrpcTarget
from stepwire_client.load.loops import LoadResult, closed_loop
from stepwire_client.load.workload import LoadRequest

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
PORT_FLAGS = (
    "--engine-port", "--frontend-port", "--frontend-http-port", "--frontend-admin-port", "--engine-metrics-port",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunningService:
    """Serving from the moment it exists."""

    target: str
    # Of AdminService.
    admin_target: str
    engine: psutil.Process
    frontend: psutil.Process

    def answer(self, requests: Sequence[LoadRequest], concurrency: int) -> LoadResult:
        """All answers; a failure of any of them is one of the benchmark."""
        return asyncio.run(self._answer(requests, concurrency))

    async def _answer(self, requests: Sequence[LoadRequest], concurrency: int) -> LoadResult:
        target = GrpcTarget(self.target, model="", ignore_eos=True, timeout_s=300.0)
        try:
            return checked(await closed_loop(target, list(requests), concurrency))
        finally:
            await target.close()


def checked(result: LoadResult) -> LoadResult:
    """Raises when a request has failed: a benchmark of failures says nothing."""
    failures = [f"{reply.failure}: {reply.failure_message}" for reply in result.replies if reply.failure]
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(result.replies)} requests failed, the first with {failures[0]}")
    return result


@contextmanager
def running(*engine_flags_: str, engine_module: str = "engine_core") -> Iterator[RunningService]:
    """The services until the end of the body; `engine_module` may be another engine with the same command line."""
    ports = [part for flag in PORT_FLAGS for part in (flag, str(free_port()))]
    log_dir = engine_flags.BUILD / "logs"
    arguments = [*ports, "--frontend-metrics-port", str(free_port()), "--log-dir", str(log_dir), *engine_flags_]
    options = launcher_options.parse(arguments)
    engine_command = services.engine_command(options, 0)
    engine_command[engine_command.index("engine_core")] = engine_module
    frontend_command = [*services.frontend_command(options), "--cache-dir", str(engine_flags.BUILD / "tokenizers")]
    with ExitStack() as stack:
        engine = _start("engine core", engine_command, stack)
        frontend = _start("frontend", frontend_command, stack)
        target = f"{HOST}:{options.frontend_port}"
        with Client(target) as client:
            services.wait_until_serving(client, [engine, frontend], READY_TIMEOUT_S)
        admin_target = f"{HOST}:{options.frontend_admin_port}"
        yield RunningService(
            target, admin_target, psutil.Process(engine.process.pid), psutil.Process(frontend.process.pid)
        )


def _start(name: str, command: list[str], stack: ExitStack) -> Child:
    environment = settings.environment_without_settings()
    child = children.start(name, command, engine_flags.BUILD / "logs", environment)
    stack.callback(_stop, child)
    return child


def _stop(child: Child) -> None:
    if problem := child.stop(STOP_TIMEOUT_S):
        sys.stderr.write(problem + "\n")


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
