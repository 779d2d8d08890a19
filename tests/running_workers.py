"""`python -m frontend --workers N` as processes of their own, for tests that come from outside."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio

from running_frontend import CHANNEL_OPTIONS
from stepwire.v1 import admin_service_pb2_grpc, generation_service_pb2_grpc, model_service_pb2, model_service_pb2_grpc

TIMEOUT_S = 60.0


class RunningWorkers:
    """The supervisor's process, its log, and connections that each go to whichever worker the kernel picks."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log = ""
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read_log())
        self._channels: list[grpc.aio.Channel] = []

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.log += line.decode()
            async with self._news:
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    async def wait_for_log(self, pattern: str, times: int = 1) -> list[str]:
        """Return what the log has of the pattern, as soon as it is there so often."""
        async with asyncio.timeout(TIMEOUT_S), self._news:
            await self._news.wait_for(lambda: len(re.findall(pattern, self.log)) >= times or self._reader.done())
        found = re.findall(pattern, self.log)
        assert len(found) >= times, f"not {times} times {pattern!r} in the log:\n{self.log}"
        return found

    async def wait_until_serving(self, num_workers: int = 2) -> None:
        [(port, metrics_port, admin_port)] = await self.wait_for_log(
            r"listening on \S+:(\d+), metrics on \S+:(\d+), admin on \S+:(\d+)"
        )
        self.port, self.metrics_port, self.admin_port = int(port), int(metrics_port), int(admin_port)
        await self.wait_for_log("now SERVING", num_workers)

    async def pids(self) -> list[int]:
        """Of all workers that were ever started."""
        return [int(pid) for pid in await self.wait_for_log(r"worker \d is process (\d+)")]

    def connect(self) -> grpc.aio.Channel:
        """A connection of its own."""
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=CHANNEL_OPTIONS)
        self._channels.append(channel)
        return channel

    def admin(self) -> admin_service_pb2_grpc.AdminServiceStub:
        self._channels.append(channel := grpc.aio.insecure_channel(f"127.0.0.1:{self.admin_port}"))
        return admin_service_pb2_grpc.AdminServiceStub(channel)

    async def instance_of(self, channel: grpc.aio.Channel) -> str:
        """The worker behind it."""
        stub = model_service_pb2_grpc.ModelServiceStub(channel)
        return (await stub.GetServerInfo(model_service_pb2.GetServerInfoRequest())).instance_id

    async def connect_to_each(self, num_workers: int = 2) -> list[grpc.aio.Channel]:
        """One connection to each worker."""
        found: dict[str, grpc.aio.Channel] = {}
        async with asyncio.timeout(TIMEOUT_S):
            while len(found) < num_workers:
                channel = self.connect()
                found.setdefault(await self.instance_of(channel), channel)
        return list(found.values())

    def generation(self, channel: grpc.aio.Channel) -> generation_service_pb2_grpc.GenerationServiceStub:
        return generation_service_pb2_grpc.GenerationServiceStub(channel)

    async def ended(self) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            code = await self.process.wait()
            await self._reader
        return code

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.ended()


@asynccontextmanager
async def running_workers(tmp_path: Path, *flags: str) -> AsyncIterator[RunningWorkers]:
    """Two workers unless the flags say otherwise; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "frontend", "--workers", "2", "--port", "0", "--metrics-port", "0", "--admin-port", "0",
        "--http-port", "0", "--cache-dir", str(tmp_path / "cache"), *flags,
        stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    running = RunningWorkers(process)
    try:
        yield running
    finally:
        await running.close()
