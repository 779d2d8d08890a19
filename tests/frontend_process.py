"""`python -m frontend` as a process of its own, attached to a fake engine; for tests that come from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from free_ports import free_port

SERVICE = "stepwire.v1.GenerationService"


@asynccontextmanager
async def serving(python: str, engine_endpoint: str, cache_dir: Path) -> AsyncIterator[str]:
    """The target of a frontend that serves; its end must be clean."""
    target = f"127.0.0.1:{free_port()}"
    command = (python, "-m", "frontend", "--port", target.split(":")[1], "--metrics-port", "0", "--admin-port", "0")
    command += ("--http-port", "0")
    flags = ("--engine-endpoints", engine_endpoint, "--cache-dir", str(cache_dir), "--owner", "parent")
    process = await asyncio.create_subprocess_exec(
        *command, *flags, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=cache_dir
    )
    # Read all along: a full pipe would stop the process.
    errors = asyncio.create_task(process.stderr.read())
    try:
        await wait_until_serving(target, process, errors)
        yield target
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
    assert process.returncode == 0, (await errors).decode()


async def wait_until_serving(target: str, process: asyncio.subprocess.Process, errors: asyncio.Task[bytes]) -> None:
    serving, ended = asyncio.create_task(_is_serving(target)), asyncio.create_task(process.wait())
    await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        serving.cancel()
        pytest.fail((await errors).decode())
    ended.cancel()
    await serving


async def _is_serving(target: str) -> None:
    async with grpc.aio.insecure_channel(target, options=[("grpc.initial_reconnect_backoff_ms", 100)]) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=60)
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return
