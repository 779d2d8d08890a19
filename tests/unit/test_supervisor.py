"""The supervisor when a process can not be made, with workers that are none."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontend.config import FrontendSettings
from frontend.role import Role
from frontend.workers import supervisor as supervisor_module
from frontend.workers.control_channel import Handler
from frontend.workers.supervisor import Supervisor
from frontend.workers.worker_handle import WorkerHandle

NO_ROOM = OSError(errno.EAGAIN, "Resource temporarily unavailable")


class IdleWorker:
    """Listens until it is told to stop, or dies."""

    def __init__(self, number: int, on_listening: Callable[[IdleWorker], Awaitable[None]]) -> None:
        self._on_listening = on_listening
        self.number = number
        self.process = SimpleNamespace(pid=number)
        self.is_listening = self.is_serving = False
        self.snapshot: list[object] = []
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self, handlers: Mapping[str, Handler]) -> int:
        await handlers["listening"](admin_port=0)
        await self._on_listening(self)
        return await self._end

    def stop(self, *, at_once: bool) -> None:
        self.end(0)

    def end(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)


class Spawning:
    """Takes the place of WorkerHandle.start: fails as often as it is told to."""

    def __init__(self) -> None:
        self.num_failures = 0
        # Those that listened, in that order.
        self.workers: list[IdleWorker] = []
        self._news = asyncio.Condition()

    async def start(self, role: Role, settings: FrontendSettings, environment: Mapping[str, str]) -> IdleWorker:
        if self.num_failures:
            self.num_failures -= 1
            raise NO_ROOM
        return IdleWorker(role.number, self._note)

    async def _note(self, worker: IdleWorker) -> None:
        async with self._news:
            self.workers.append(worker)
            self._news.notify_all()

    async def wait_for(self, num_workers: int) -> None:
        async with asyncio.timeout(30), self._news:
            await self._news.wait_for(lambda: len(self.workers) >= num_workers)


@pytest.fixture
async def spawning(monkeypatch: pytest.MonkeyPatch) -> Spawning:
    spawning = Spawning()
    monkeypatch.setattr(WorkerHandle, "start", spawning.start)
    monkeypatch.setattr(supervisor_module, "MIN_BACKOFF_S", 0.0)
    return spawning


@asynccontextmanager
async def supervisor(tmp_path: Path) -> AsyncIterator[tuple[Supervisor, asyncio.Task[int]]]:
    ports = {"port": 0, "http_port": 0, "metrics_port": 0, "admin_port": 0}
    one = Supervisor(FrontendSettings(workers=2, cache_dir=tmp_path, **ports))
    running = asyncio.create_task(one.run())
    try:
        yield one, running
    finally:
        one.request_stop(at_once=True)
        await asyncio.wait({running})


async def test_a_worker_whose_process_could_not_be_made_is_tried_again(spawning: Spawning, tmp_path: Path):
    async with supervisor(tmp_path) as (one, running):
        await spawning.wait_for(2)
        spawning.num_failures = 2
        spawning.workers[0].end(1)
        await spawning.wait_for(3)
        assert (spawning.num_failures, spawning.workers[2].number) == (0, spawning.workers[0].number)
        assert not running.done()
        one.request_stop()
        async with asyncio.timeout(30):
            assert await running == 0


async def test_without_a_single_process_the_frontend_ends_with_an_error(spawning: Spawning, tmp_path: Path):
    spawning.num_failures = 100
    async with supervisor(tmp_path) as (_, running), asyncio.timeout(30):
        assert await running == 1
    assert spawning.workers == []


async def test_a_process_that_could_not_be_made_leaves_no_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def fail(*given: object, **options: object) -> None:
        raise NO_ROOM

    ends = socket.socketpair()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    monkeypatch.setattr(socket, "socketpair", lambda: ends)
    with pytest.raises(OSError, match="unavailable"):
        await WorkerHandle.start(Role(0, is_worker=True), FrontendSettings(cache_dir=tmp_path), {})
    assert [end.fileno() for end in ends] == [-1, -1]
