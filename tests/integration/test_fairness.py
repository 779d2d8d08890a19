"""A tenant that floods does not keep another waiting or out, and a canary in a request shows up in no log or error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from pathlib import Path

import grpc
import pytest

from fakes.fake_engine import FakeEngine
from fakes.looped_engine import LoopedEngine
from running_frontend import SERVING, RunningFrontend, request, running_frontend
from stepwire.v1 import common_pb2

CANARY = "xyzzy-canary"


def tenant(name: str) -> tuple[tuple[str, str], ...]:
    return (("x-gateway-inference-fairness-id", name),)


async def test_a_flood_leaves_room_for_another_tenant(engine: FakeEngine, tmp_path: Path):
    settings = {"cache_dir": tmp_path / "cache", "max_concurrent_requests": 16}
    async with running_frontend(engine.endpoint, **settings) as running:
        await running.wait_for_health(SERVING)
        await running.generation.Generate(request(), metadata=tenant("quiet"))
        engine.may_step.clear()
        flood = [running.stream(request(), metadata=tenant("loud")) for _ in range(64)]
        first = await asyncio.gather(*(stream.next() for stream in flood), return_exceptions=True)
        assert sum(not isinstance(answer, Exception) for answer in first) == 14
        quiet = [running.stream(request(), metadata=tenant("quiet")) for _ in range(2)]
        for stream in quiet:
            assert (await stream.next()).HasField("accepted")
        engine.may_step.set()
        for stream, answer in [*zip(flood, first, strict=True), *((stream, None) for stream in quiet)]:
            if not isinstance(answer, Exception):
                await stream.rest()


def steps_to_first_token(num_flood: int) -> list[int]:
    """Of ten requests of a tenant, one after the other, among as many of another."""
    engine = LoopedEngine(num_blocks=4096, max_num_seqs=16)
    for handle in range(num_flood):
        engine.add(handle, max_tokens=5, client_class="loud")
    steps = []
    for handle in range(200, 210):
        engine.add(handle, max_tokens=5, client_class="quiet")
        num_steps = 0
        while not engine.tokens.get(handle):
            engine.turn()
            num_steps += 1
        steps.append(num_steps)
        while handle not in engine.finishes:
            engine.turn()
    return steps


def test_in_the_engine_a_tenant_waits_for_a_place_and_not_for_the_flood():
    # Places come free every 5 steps: behind 200 requests the wait would be 60. The first one finds them all taken.
    first, *others = steps_to_first_token(200)
    alone = max(steps_to_first_token(0))
    assert first <= alone + 6
    assert max(others) == alone


# Quiet requests, and the steps between their arrivals.
NUM_QUIET, ARRIVAL_INTERVAL = 40, 2


def steady_steps_to_first_token(num_flood: int) -> list[int]:
    """Of requests that arrive at a steady pace, whether or not those before them are done."""
    engine = LoopedEngine(num_blocks=4096, max_num_seqs=16)
    for handle in range(num_flood):
        engine.add(handle, max_tokens=4 + handle % 5, client_class="loud")
    # The flood has taken every place, and its requests no longer end in step with each other.
    engine.turn(10)
    arrivals: dict[int, int] = {}
    steps: dict[int, int] = {}
    step = 0
    while len(steps) < NUM_QUIET:
        if step % ARRIVAL_INTERVAL == 0 and len(arrivals) < NUM_QUIET:
            assert num_flood == 0 or len(engine.scheduler.waiting) > 0, "the flood is over"
            arrivals[num_flood + len(arrivals)] = step
            engine.add(max(arrivals), max_tokens=5, client_class="quiet")
        engine.turn()
        step += 1
        steps |= {key: step - arrivals[key] for key in arrivals if key not in steps and engine.tokens.get(key)}
    return list(steps.values())


def p95(values: list[int]) -> int:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def test_a_flood_at_most_doubles_the_steps_to_a_quiet_tenants_first_tokens():
    assert p95(steady_steps_to_first_token(320)) <= 2 * p95(steady_steps_to_first_token(0))


async def test_no_log_and_no_error_has_a_prompt_in_it(
    frontend: RunningFrontend, engine: FakeEngine, caplog: pytest.LogCaptureFixture
):
    structured = common_pb2.StructuredOutput
    bad = [
        request(CANARY, sampling=common_pb2.SamplingParams(top_p=7)),
        request(CANARY * 100_000),
        request(CANARY, stop=common_pb2.StopConditions(stop=[CANARY, ""])),
        request(CANARY, sampling=common_pb2.SamplingParams(bad_words=[CANARY, ""])),
        request(structured_output=structured(regex=f"({CANARY}")),
        request(structured_output=structured(json_schema=f'{{"{CANARY}": ')),
        request(structured_output=structured(grammar=CANARY)),
    ]
    texts = []
    with caplog.at_level(logging.DEBUG):
        assert (await frontend.generation.Generate(request(CANARY, max_tokens=20))).completions[0].text
        engine.fail = lambda add, index: common_pb2.EngineError(reason="REQUEST_FAILED", message="odd", grpc_code=13)
        for message in [*bad, request(CANARY)]:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await frontend.generation.Generate(message)
                raise AssertionError(f"{message} was answered")
        for message in bad:
            try:
                await frontend.generation.Generate(message)
            except grpc.aio.AioRpcError as error:
                texts.append(f"{error.details()} {error.trailing_metadata()}")
    assert len(texts) == len(bad)
    assert CANARY not in " ".join(texts)
    assert CANARY not in caplog.text
