"""Requests of every fate, and a count of how each ended and what it brought: what metrics are compared with."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from fakes.fake_executor import SLOW_TOKEN
from running_frontend import unpack
from running_stack import Frontend
from stepwire.v1 import common_pb2, generation_service_pb2_grpc
from stepwire.v1.generation_service_pb2 import AbortRequest, GenerateRequest

TIMEOUT_S = 240.0
CHAT = [{"role": "user", "content": "hello"}]
_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "abort",
}


@dataclass
class Counts:
    """As the callers saw it. Prompt tokens count once a request, for the engines once a choice."""

    ends: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    # Choices that callers have ended, by the frontends' reasons; and HTTP requests by path, all of them answered.
    aborted: Counter[str] = field(default_factory=Counter)
    http: Counter[str] = field(default_factory=Counter)
    num_submitted: int = 0
    num_with_tokens: int = 0
    num_choices: int = 0
    num_prompt_tokens: int = 0
    num_engine_prompt_tokens: int = 0
    num_output_tokens: int = 0


def make_request(*prompt: int, max_tokens: int, **fields: Any) -> GenerateRequest:
    """Greedy, and no end of sequence ends it."""
    request = GenerateRequest(token_ids=common_pb2.TokenIds(ids=prompt), **fields)
    request.stop.max_tokens = max_tokens
    request.stop.ignore_eos = True
    request.output.token_ids = True
    request.sampling.temperature = 0
    return request


class Caller:
    """One request; `started` is set by its first token, `accepted` by its place in an engine."""

    def __init__(
        self, load: MeteredLoad, frontend: int, request: GenerateRequest, *, num_choices: int, rank: int | None
    ) -> None:
        self.accepted = asyncio.Event()
        self.started = asyncio.Event()
        self.engine_id = ""
        self.request_id = ""
        self._load = load
        self._stub = load.stubs[frontend]
        self._request = request
        self._num_choices = num_choices
        self._metadata = () if rank is None else (("x-data-parallel-rank", str(rank)),)
        self._num_tokens = 0
        self._unfinished = num_choices
        self._call: Any = None
        self.task = asyncio.create_task(self._run())

    async def abort(self) -> None:
        """Ask for its end, and let it have it."""
        self._load.counts.aborted["requested"] += self._unfinished
        await self._stub.Abort(AbortRequest(request_ids=[self.request_id]))
        await self.task

    async def cancel(self) -> None:
        """Go away without a word."""
        self._load.counts.aborted["client_cancelled"] += self._unfinished
        self._call.cancel()
        await self.task

    async def _run(self) -> None:
        self._call = self._stub.GenerateStream(self._request, timeout=TIMEOUT_S, metadata=self._metadata)
        code, lost_as = "OK", ""
        try:
            async for message in self._call:
                self._take(message)
        except asyncio.CancelledError:
            # Its own `cancel`, as the library tells it.
            code, lost_as = "CANCELLED", "abort"
        except grpc.aio.AioRpcError as error:
            code, lost_as = error.code().name, self._fate(unpack(error).reason)
        self._load.note_end(self._request, code, lost_as, self._num_choices, self._unfinished, self._num_tokens)

    def _fate(self, reason: str) -> str:
        if reason == "QUEUE_TIMEOUT":
            # Also where its end came together with the news that it was queued.
            return "abort"
        if not self.accepted.is_set():
            self._load.counts.rejected[reason] += 1
            return ""
        return "error"

    def _take(self, message: Any) -> None:
        if message.HasField("accepted"):
            self.engine_id, self.request_id = message.accepted.engine_id, message.accepted.request_id
            self.accepted.set()
        elif message.HasField("delta"):
            self._num_tokens += len(message.delta.token_ids)
            self.started.set()
        else:
            self._unfinished -= 1
            if message.finished.HasField("usage"):
                # With the stop tokens, which no delta shows.
                self._num_tokens = message.finished.usage.completion_tokens
            self._load.counts.ends[_REASONS[message.finished.reason]] += 1


class MeteredLoad:
    """Frontends, requests sent to them in turn, and the counts of all. `http_ports` are those of the frontends."""

    def __init__(self, frontends: Sequence[Frontend], http_ports: Sequence[int]) -> None:
        self.counts = Counts()
        self._http_ports = http_ports
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") for frontend in frontends]
        self.stubs = [generation_service_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._turn = 0

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    def send(self, request: GenerateRequest, *, num_choices: int = 1, rank: int | None = None) -> Caller:
        """To the next frontend; to an engine of this rank, or to any."""
        if num_choices > 1:
            request.sampling.n = num_choices
            request.sampling.temperature = 1
        self._turn += 1
        return Caller(self, self._turn % len(self.stubs), request, num_choices=num_choices, rank=rank)

    async def burst(self, num: int, stop_token_ids: Sequence[int]) -> None:
        """Requests that end by themselves or are refused, all at once; two of them come over HTTP."""
        kinds: tuple[Callable[[int], Caller], ...] = (
            lambda n: self.send(make_request(10, 11, 12 + n, max_tokens=1 + n % 7)),
            lambda n: self.send(make_request(*range(20, 60), 60 + n, max_tokens=5)),
            lambda n: self.send(make_request(13, 14 + n, max_tokens=9), num_choices=2),
            lambda n: self.send(_stopping(make_request(15, 16 + n, max_tokens=40), stop_token_ids)),
            lambda n: self.send(make_request(17, max_tokens=0)),
        )
        await asyncio.gather(
            *(kinds[n % len(kinds)](n).task for n in range(num)),
            self.post(self._http_ports[0], "/v1/completions", {"prompt": [10, 11, 12], "max_tokens": 4}),
            self.post(self._http_ports[-1], "/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
        )

    async def post(self, port: int, path: str, body: dict[str, Any]) -> None:
        """A request over HTTP, to its end."""
        answer = await asyncio.to_thread(_post, f"http://127.0.0.1:{port}{path}", {"model": "", **body})
        counts, usage = self.counts, answer["usage"]
        counts.http[path] += 1
        counts.ends.update(choice["finish_reason"] for choice in answer["choices"])
        counts.num_submitted += 1
        counts.num_choices += 1
        counts.num_with_tokens += usage["completion_tokens"] > 0
        counts.num_prompt_tokens += usage["prompt_tokens"]
        counts.num_engine_prompt_tokens += usage["prompt_tokens"]
        counts.num_output_tokens += usage["completion_tokens"]

    async def occupy(self, num: int) -> list[Caller]:
        """Long requests that have begun; they fill the engines of ranks 0 and 1."""
        callers = [self.send(make_request(SLOW_TOKEN, 30 + n, max_tokens=3000), rank=n % 2) for n in range(num)]
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(caller.started.wait() for caller in callers))
        return callers

    def note_end(
        self, request: GenerateRequest, code: str, lost_as: str, choices: int, unfinished: int, tokens: int
    ) -> None:
        counts = self.counts
        counts.codes[code] += 1
        if code != "OK":
            if not lost_as:
                return
            counts.ends[lost_as] += unfinished
        counts.num_submitted += 1
        counts.num_choices += choices
        counts.num_with_tokens += tokens > 0
        counts.num_prompt_tokens += len(request.token_ids.ids)
        counts.num_engine_prompt_tokens += choices * len(request.token_ids.ids)
        counts.num_output_tokens += tokens


def _post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=TIMEOUT_S) as response:
        return json.load(response)


def _stopping(request: GenerateRequest, stop_token_ids: Sequence[int]) -> GenerateRequest:
    request.stop.stop_token_ids.extend(stop_token_ids)
    return request
