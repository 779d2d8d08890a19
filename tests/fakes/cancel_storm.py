"""Clients that go away at a random moment, in every way there is: cancel, deadline, closed connection, Abort.

Everything is drawn from the seed but the order in which the two processes come to run. A moment is a number of turns of
the event loop, which the clients share with the frontend, or a number of messages.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2_grpc

from fakes.cancel_visits import (
    Visit,
    chat_request,
    draw_visit,
    embed_request,
    gateway_request,
    generate_request,
    http_request,
)
from fuzzed_stack import FuzzedStack
from stepwire.v1 import (
    chat_service_pb2_grpc,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
)

_NUM_CLIENTS = 48
_ALLOWED = {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}


class CancelStorm:
    """`blow` once."""

    def __init__(self, stack: FuzzedStack, seed: int) -> None:
        self._stack = stack
        self._rng = random.Random(seed)
        self._shared = stack.frontend.channel
        # (end, what came of it)
        self.ends: Counter[tuple[str, str]] = Counter()

    async def blow(self, num_requests: int) -> None:
        """All requests, some at a time. Raises AssertionError for an end that none of them has asked for."""
        visits = iter([draw_visit(self._rng, f"visit-{number}") for number in range(num_requests)])

        async def client() -> None:
            for visit in visits:
                self.ends[visit.end, await self._make(visit)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(_NUM_CLIENTS):
                group.create_task(client())

    async def _make(self, visit: Visit) -> str:
        if visit.way.startswith("http"):
            return await self._visit_http(visit)
        if visit.end != "disconnect":
            return await self._visit_grpc(visit, self._shared)
        target = f"127.0.0.1:{self._stack.frontend.process.port}"
        channel = grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        try:
            return await self._visit_grpc(visit, channel)
        finally:
            await channel.close()

    async def _visit_grpc(self, visit: Visit, channel: grpc.aio.Channel) -> str:
        generation = generation_service_pb2_grpc.GenerationServiceStub(channel)
        chat = chat_service_pb2_grpc.ChatServiceStub(channel)
        embedding = embedding_service_pb2_grpc.EmbeddingServiceStub(channel)
        method, message = {
            "unary": (generation.Generate, generate_request(visit)),
            "stream": (generation.GenerateStream, generate_request(visit)),
            "chat": (chat.Chat, chat_request(visit)),
            "chat_stream": (chat.ChatStream, chat_request(visit)),
            "embed": (embedding.Embed, embed_request(visit)),
            "gateway_stream": (vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate, gateway_request(visit)),
        }[visit.way]
        call = method(message, timeout=visit.timeout_s if visit.end == "deadline" else 60)
        reading = asyncio.create_task(_read(call, visit))
        await _turns(visit.num_turns)
        await self._end_grpc(visit, call, channel, reading)
        try:
            await reading
        except asyncio.CancelledError:
            return "CANCELLED"
        except grpc.aio.AioRpcError as error:
            if error.code() not in _ALLOWED:
                raise AssertionError(f"{visit} ended with {error.code()}: {error.details()}") from error
            return error.code().name
        return "OK"

    async def _end_grpc(
        self, visit: Visit, call: grpc.aio.Call, channel: grpc.aio.Channel, reading: asyncio.Task[None]
    ) -> None:
        """Do what this client does instead of waiting."""
        if visit.end == "cancel":
            if visit.way.endswith("stream") and visit.num_messages:
                await asyncio.wait({reading})
            call.cancel()
        elif visit.end == "disconnect":
            await channel.close()
        elif visit.end == "abort":
            await self._abort(visit)

    async def _abort(self, visit: Visit) -> None:
        """Twice at once, beside an id that nobody has."""
        stub = generation_service_pb2_grpc.GenerationServiceStub(self._shared)
        message = generation_service_pb2.AbortRequest(request_ids=[visit.name, "nobody", visit.name])
        await asyncio.gather(stub.Abort(message, timeout=60), stub.Abort(message, timeout=60))

    async def _visit_http(self, visit: Visit) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._stack.http_port)
        writer.write(http_request(visit))
        await _turns(visit.num_turns)
        try:
            if visit.end == "abort":
                await self._abort(visit)
            if visit.end == "disconnect":
                for _ in range(visit.num_messages):
                    await reader.readline()
                # With and without a word to the other side.
                (writer.transport.abort if visit.num_turns % 2 else writer.close)()
                return "gone"
            status = (await reader.read()).split(b" ", 2)[1].decode()
            assert status in ("200", "499"), (visit, status)
            return status
        finally:
            writer.close()


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def _read(call: grpc.aio.UnaryUnaryCall | grpc.aio.UnaryStreamCall, visit: Visit) -> None:
    """All of it; a stream that is to be cancelled after some messages, only those."""
    if not visit.way.endswith("stream"):
        await call
        return
    num_left = visit.num_messages if visit.end == "cancel" and visit.num_messages else None
    async for _ in call:
        if num_left is not None:
            num_left -= 1
            if num_left == 0:
                return
