"""JSON messages over one socket, both ways: either end calls the other, or tells it something. Owner: the event loop.

A message is its length, four bytes, and a JSON object. What one end sends is taken up by the other in that order, and
each handler begins in that order too; answers come when they are there. The socket is a pair's half: nobody else can
connect, and its end is the end of the process behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

LENGTH_BYTES = 4

Handler = Callable[..., Awaitable[Any]]


class ChannelClosedError(Exception):
    """The process at the other end is gone, or could not answer."""


class ControlChannel:
    """Made by `open`; messages are taken up while `run` runs, which returns when the other end is gone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._is_over = False

    @classmethod
    async def open(cls, end: socket.socket) -> ControlChannel:
        return cls(*await asyncio.open_connection(sock=end))

    async def receive(self) -> dict[str, Any]:
        """The next message, for what is agreed upon before `run`. Raises ChannelClosedError."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            message: dict[str, Any] = json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChannelClosedError("the other end is gone") from None
        return message

    def send(self, message: Mapping[str, Any]) -> None:
        """Never waits; to an end that is gone it does nothing."""
        data = json.dumps(message).encode()
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    def tell(self, name: str, **arguments: Any) -> None:
        """Let the other end run the handler of this name, whatever comes of it."""
        self.send({"name": name, "arguments": arguments})

    async def call(self, name: str, **arguments: Any) -> Any:
        """What the other end's handler of this name returns. Raises ChannelClosedError."""
        if self._is_over:
            raise ChannelClosedError("the other end is gone")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.send({"name": name, "arguments": arguments, "number": number})
            return await answer
        finally:
            del self._waiting[number]

    async def run(self, handlers: Mapping[str, Handler]) -> None:
        """Take up messages until the other end is gone; calls that wait then end with ChannelClosedError."""
        try:
            while True:
                self._take(await self.receive(), handlers)
        except ChannelClosedError:
            pass
        finally:
            self._is_over = True
            self._writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ChannelClosedError("the other end is gone"))

    def _take(self, message: dict[str, Any], handlers: Mapping[str, Handler]) -> None:
        if "name" in message:
            task = asyncio.create_task(self._answer(message, handlers[message["name"]]))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        answer = self._waiting.get(message["number"])
        if answer is None or answer.done():
            return
        if "result" in message:
            answer.set_result(message["result"])
        else:
            answer.set_exception(ChannelClosedError("the other end could not answer"))

    async def _answer(self, message: dict[str, Any], handler: Handler) -> None:
        outcome: dict[str, Any] = {}
        try:
            outcome["result"] = await handler(**message["arguments"])
        except Exception:
            # Whoever asked must not wait for ever.
            logger.exception("control message %s failed", message["name"])
        if "number" in message:
            self.send({"number": message["number"], **outcome})
