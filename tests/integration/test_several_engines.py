"""Three engines and two frontends under a load that never stops, while engines end, die and come back: real processes.

Only the model is a fake; a step takes as long as one of a model would.
"""

from __future__ import annotations

import asyncio
import collections
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest

from fakes.fake_executor import SLOW_TOKEN
from free_ports import free_port
from running_frontend import Failure, unpack
from running_stack import SERVING, Frontend, Service, Stack, running_stack
from stepwire.v1 import common_pb2, generation_service_pb2_grpc
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

NUM_CALLERS = 200
MAX_TOKENS = 40
TIMEOUT_S = 120.0
ENGINES = ("engine-0", "engine-1", "engine-2")
ENDING, DYING, STAYING = ENGINES


@dataclass(frozen=True)
class Answer:
    """How one stream ended."""

    engine_id: str
    failure: Failure | None = None


class Load:
    """Callers that each ask again as soon as they have been answered, in turn on the frontends."""

    def __init__(self, frontends: Sequence[Frontend]) -> None:
        self.answers: list[Answer] = []
        # Caller -> the engine that has accepted its request.
        self.running: dict[int, str] = {}
        self._is_over = False
        self._news = asyncio.Condition()
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}") for frontend in frontends]
        stubs = [generation_service_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._callers = [asyncio.create_task(self._call(n, stubs[n % len(stubs)])) for n in range(NUM_CALLERS)]

    @property
    def failures(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.failure is not None]

    @property
    def num_running(self) -> collections.Counter[str]:
        """Streams by engine."""
        return collections.Counter(self.running.values())

    async def wait_until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S), self._news:
            await self._news.wait_for(condition)

    async def wait_for_answers(self, num: int) -> list[Answer]:
        """The next answers."""
        start = len(self.answers)
        await self.wait_until(lambda: len(self.answers) >= start + num)
        return self.answers[start:]

    async def stop(self) -> None:
        """Let every caller have its answer."""
        self._is_over = True
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*self._callers)
        for channel in self._channels:
            await channel.close()

    async def _call(self, caller: int, stub: generation_service_pb2_grpc.GenerationServiceStub) -> None:
        while not self._is_over:
            answer = await self._ask(caller, stub)
            self.running.pop(caller, None)
            self.answers.append(answer)
            await self._tell()

    async def _ask(self, caller: int, stub: generation_service_pb2_grpc.GenerationServiceStub) -> Answer:
        request = GenerateRequest(token_ids=common_pb2.TokenIds(ids=[SLOW_TOKEN, 3 + caller]))
        request.stop.max_tokens = MAX_TOKENS
        request.stop.ignore_eos = True
        request.sampling.temperature = 0
        try:
            async for message in stub.GenerateStream(request, timeout=TIMEOUT_S):
                if message.HasField("accepted"):
                    self.running[caller] = message.accepted.engine_id
                    await self._tell()
        except grpc.aio.AioRpcError as error:
            failure = unpack(error)
            return Answer(failure.info.metadata["engine_id"], failure)
        assert message.finished.usage.completion_tokens == MAX_TOKENS
        return Answer(self.running[caller])

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


class Fleet:
    """The engines by name; one that is started again has its old address."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._ports = {name: free_port() for name in ENGINES}
        self.engines = {name: self._start(name) for name in ENGINES}

    def _start(self, name: str) -> Service:
        flags = ("--engine-id", name, "--drain-timeout-s", str(TIMEOUT_S), "--fake-slow-step-s", "0.05")
        return self._stack.engine(*flags, port=self._ports[name], package="fakes.fake_engine_process")

    async def start(self, name: str) -> None:
        self.engines[name] = await asyncio.to_thread(self._start, name)


@pytest.fixture
def stack(tokenizer_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    with running_stack(tokenizer_dir, tmp_path / "cache") as stack:
        yield stack


def wait_for_metric(service: Service, name: str, value: float) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while service.metric(name) != value:
        assert time.monotonic() < deadline, f"{name} is {service.metric(name)}"


def is_even(num_by_engine: collections.Counter[str], within: float) -> bool:
    even = num_by_engine.total() / len(ENGINES)
    return all(abs(num_by_engine[name] - even) <= within * even for name in ENGINES)


async def test_engines_come_and_go_under_load(stack: Stack, tokenizer_dir: Path) -> None:
    fleet = Fleet(stack)
    frontends = [stack.frontend(*fleet.engines.values(), flags=("--tokenizer", str(tokenizer_dir))) for _ in range(2)]
    for frontend in frontends:
        frontend.wait_for_health(SERVING)
        wait_for_metric(frontend, "stepwire_frontend_engine_up", len(ENGINES))
    load = Load(frontends)

    # All at once, and then as they come. What the other frontend asks for at that moment a frontend learns with the
    # engines' next report, and an engine that gets no time reports late: what comes later makes up for it.
    await load.wait_until(lambda: len(load.running) == NUM_CALLERS)
    await load.wait_until(lambda: is_even(load.num_running, within=0.35))
    await load.wait_for_answers(2 * NUM_CALLERS)
    await load.wait_until(lambda: is_even(collections.Counter(one.engine_id for one in load.answers), within=0.2))

    # An orderly end of one: nobody notices.
    await load.wait_until(lambda: load.num_running[ENDING] > 0)
    fleet.engines[ENDING].signal(signal.SIGTERM)
    assert await asyncio.to_thread(fleet.engines[ENDING].wait) == 0
    assert {answer.engine_id for answer in await load.wait_for_answers(NUM_CALLERS)} >= {DYING, STAYING}
    assert load.failures == []
    await fleet.start(ENDING)
    await load.wait_until(lambda: load.num_running[ENDING] > 0)

    # A sudden end of another: it takes its own with it.
    await load.wait_until(lambda: load.num_running[DYING] > 0)
    await asyncio.to_thread(fleet.engines[DYING].kill)
    await load.wait_until(lambda: load.failures and not load.num_running[DYING])
    await load.wait_for_answers(NUM_CALLERS)
    assert {(lost.engine_id, lost.failure.reason) for lost in load.failures} == {(DYING, "ENGINE_DEAD")}
    num_lost = len(load.failures)
    await fleet.start(DYING)
    await load.wait_until(lambda: load.num_running[DYING] > 0)
    assert {answer.engine_id for answer in await load.wait_for_answers(2 * NUM_CALLERS)} == set(ENGINES)

    await load.stop()
    assert len(load.failures) == num_lost < NUM_CALLERS
    for frontend in frontends:
        wait_for_metric(frontend, "stepwire_frontend_live_handles", 0)
    for engine in fleet.engines.values():
        wait_for_metric(engine, "stepwire_engine_core_requests_running", 0)
