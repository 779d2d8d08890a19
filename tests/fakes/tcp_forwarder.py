"""A TCP port that leads to another one, until the test has it go silent or closed. Owner: the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fakes.fake_engine import WAIT_S


class TcpForwarder:
    """Made by `forwarder`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.port = 0
        # Connections are closed as soon as they come while it is False.
        self.is_open = True
        self.num_connections = 0
        # All bytes that came from those who connect.
        self.num_bytes_in = 0
        self._passing: list[asyncio.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Condition()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def fall_silent(self) -> None:
        """Of the connections there are now nothing passes any more, the end neither; new ones are as good as ever."""
        for passing in self._passing:
            passing.clear()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds; looked at with each connection and each piece that comes."""
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(condition)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        await self._tell()
        try:
            if self.is_open:
                await self._forward(reader, writer)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        passing = asyncio.Event()
        passing.set()
        self._passing.append(passing)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, far_writer, passing, is_in=True))
                group.create_task(self._copy(far_reader, writer, passing))
        finally:
            far_writer.close()

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, passing: asyncio.Event, *, is_in: bool = False
    ) -> None:
        try:
            while data := await source.read(65536):
                if is_in:
                    self.num_bytes_in += len(data)
                    await self._tell()
                await passing.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        await passing.wait()
        sink.close()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


@asynccontextmanager
async def forwarder(target_port: int) -> AsyncIterator[TcpForwarder]:
    """Listening on a free port of this host inside; all its connections are cut outside."""
    forwarding = TcpForwarder(target_port)
    server = await asyncio.start_server(forwarding.serve, "127.0.0.1", 0)
    forwarding.port = server.sockets[0].getsockname()[1]
    try:
        yield forwarding
    finally:
        server.close()
        await forwarding.stop()
