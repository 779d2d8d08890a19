"""Clients that go away at a random moment, in every way there is: cancel, deadline, closed connection, Abort.

Everything is drawn from the seed but the order in which the two processes come to run. A moment is a number of turns of
the event loop, which the clients share with the frontend, or a number of messages.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass

import grpc
import grpc.aio

from fuzzed_stack import FuzzedStack
from stepwire.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    common_pb2,
    generation_service_pb2,
    generation_service_pb2_grpc,
)

WAYS = ("unary", "stream", "chat", "chat_stream", "http", "http_stream", "http_chat")
ENDS = ("cancel", "deadline", "disconnect", "abort", "none")
_NUM_CLIENTS = 48
# Most awaits of a handler are in its first turns.
_TURNS = (0, 1, 2, 3, 5, 8, 13, 30, 100, 300)
_ALLOWED = {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
_REGEX = "[a-z]{1,40}"


@dataclass(frozen=True)
class Visit:
    """One request and the end that its client has in mind."""

    name: str
    way: str
    end: str
    num_turns: int
    num_messages: int
    timeout_s: float
    num_choices: int
    max_tokens: int
    stop: tuple[str, ...]
    has_logprobs: bool
    has_grammar: bool


def draw_visit(rng: random.Random, name: str) -> Visit:
    way = rng.choice(WAYS)
    # Over HTTP a client has no deadline and no way to cancel but to go.
    end = rng.choice(ENDS) if not way.startswith("http") else rng.choice(("disconnect", "disconnect", "abort", "none"))
    return Visit(
        name,
        way,
        end,
        num_turns=rng.choice(_TURNS),
        num_messages=rng.choice((0, 0, 1, 2, 5)),
        timeout_s=rng.choice((0.001, 0.05, 0.052, 0.06, 0.1, 0.2)),
        num_choices=rng.choice((1, 1, 1, 2, 3)),
        max_tokens=rng.choice((1, 5, 50, 150)),
        stop=tuple(rng.sample(("e", "lo", "zz", "\n"), rng.choice((0, 0, 1, 2)))),
        has_logprobs=rng.random() < 0.2,
        has_grammar=rng.random() < 0.1,
    )


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
        method, message = {
            "unary": (generation.Generate, generate_request(visit)),
            "stream": (generation.GenerateStream, generate_request(visit)),
            "chat": (chat.Chat, chat_request(visit)),
            "chat_stream": (chat.ChatStream, chat_request(visit)),
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


def generate_request(visit: Visit) -> generation_service_pb2.GenerateRequest:
    return generation_service_pb2.GenerateRequest(
        request_id=visit.name, text=f"hello world {visit.name}", **_parameters(visit)
    )


def chat_request(visit: Visit) -> chat_service_pb2.ChatRequest:
    part = chat_service_pb2.ContentPart(text=f"hello {visit.name}")
    message = chat_service_pb2.Message(role=chat_service_pb2.ROLE_USER, content=[part])
    return chat_service_pb2.ChatRequest(request_id=visit.name, messages=[message], **_parameters(visit))


def _parameters(visit: Visit) -> dict[str, object]:
    return {
        "sampling": common_pb2.SamplingParams(n=visit.num_choices, temperature=1, seed=7),
        "stop": common_pb2.StopConditions(max_tokens=visit.max_tokens, stop=visit.stop),
        "output": common_pb2.OutputOptions(token_ids=True, logprobs=2 if visit.has_logprobs else None),
        "structured_output": common_pb2.StructuredOutput(regex=_REGEX) if visit.has_grammar else None,
    }


def http_request(visit: Visit) -> bytes:
    is_chat = visit.way == "http_chat"
    body: dict[str, object] = {
        "n": visit.num_choices,
        "max_tokens": visit.max_tokens,
        "stop": list(visit.stop),
        "stream": visit.way != "http",
        "seed": 7,
        "guided_regex": _REGEX if visit.has_grammar else None,
        "logprobs": (True if is_chat else 2) if visit.has_logprobs else None,
    }
    body |= {"messages": [{"role": "user", "content": "hello"}]} if is_chat else {"prompt": ["hello", "world"]}
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
    return f"{head}x-request-id: {visit.name}\r\n\r\n".encode() + data
