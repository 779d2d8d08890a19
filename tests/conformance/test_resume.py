"""A client library that goes on with an answer after its engine has died: nothing is missing, nothing comes twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conformance import checks, runners
from conformance.runners import Runner
from fakes.fake_engine import FakeEngine
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from running_frontend import RunningFrontend, running_frontend
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2
from stepwire.v1 import common_pb2

pytestmark = pytest.mark.slow

METHOD = "GenerationService/GenerateStream"
NUM_TOKENS = 12
NUM_BEFORE_DEATH = 5
REQUEST = {
    "text": "a b c d",
    "sampling": {"temperature": 0.7},
    "stop": {"max_tokens": NUM_TOKENS},
    "output": {"token_ids": True},
}


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[FakeEngine]]:
    (tmp_path / "model").mkdir()
    directory = write_model_dir(tmp_path / "model", byte_level_backend(), config={"eos_token_id": 0})
    first, second = (FakeEngine(directory, vocab_size=400, engine_id=f"fake-{number}") for number in range(2))
    async with first.running(), second.running():
        yield [first, second]


@pytest.fixture
async def frontend(engines: list[FakeEngine], tmp_path: Path) -> AsyncIterator[RunningFrontend]:
    endpoints = [engine.endpoint for engine in engines]
    async with running_frontend(*endpoints, cache_dir=tmp_path / "cache") as running:
        pool = running.process.frontend.pool
        await running.wait_until(lambda: all(connection.is_available for connection in pool.connections))
        yield running


@pytest.fixture(params=runners.RESUMING)
def runner(request: pytest.FixtureRequest, frontend: RunningFrontend) -> Any:
    with runners.start(request.param, f"127.0.0.1:{frontend.process.port}") as runner:
        yield runner


async def test_an_answer_goes_on_at_another_engine(
    runner: Runner, frontend: RunningFrontend, engines: list[FakeEngine]
):
    undisturbed = await asyncio.to_thread(runner.call, METHOD, REQUEST)
    assert len(checks.token_ids_of(undisturbed)) == NUM_TOKENS
    for engine in engines:
        engine.adds.clear()
        engine.fail = halting(engine)
    reply_to_come = asyncio.create_task(asyncio.to_thread(runner.call, METHOD, REQUEST, resume=True))
    deaths = [asyncio.create_task(dying(engine, frontend)) for engine in engines]
    await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
    reply = await reply_to_come

    checks.check(reply, {"kinds": ["accepted", "delta", "finished"]}, {})
    assert checks.token_ids_of(reply) == checks.token_ids_of(undisturbed)
    assert checks.text_of(reply) == checks.text_of(undisturbed)
    first, second = sorted((add for engine in engines for add in engine.adds), key=has_resumed)
    # A client may ask for its last delta again, to see whether the answer had ended with it.
    assert token_array.unpack(second.resume_output_token_ids) in (
        checks.token_ids_of(reply)[:NUM_BEFORE_DEATH],
        checks.token_ids_of(reply)[: NUM_BEFORE_DEATH - 1],
    )
    assert reply.messages[0].accepted.seed == first.sampling.seed == second.sampling.seed


def has_resumed(add: engine_core_pb2.EngineCoreRequest) -> bool:
    return bool(add.resume_output_token_ids)


def halting(engine: FakeEngine) -> Any:
    """What stops the steps of an engine at each of the first tokens of an answer that it has begun."""

    def halt(add: engine_core_pb2.EngineCoreRequest, index: int) -> common_pb2.EngineError | None:
        if index < NUM_BEFORE_DEATH and not has_resumed(add):
            engine.may_step.clear()
        return None

    return halt


async def dying(engine: FakeEngine, frontend: RunningFrontend) -> None:
    """Each token is a delta of its own: a client resumes in front of its last one, which may be the whole answer."""
    for num_tokens in range(1, NUM_BEFORE_DEATH + 1):
        await engine.wait_until(lambda: not engine.may_step.is_set())
        await frontend.wait_for_tokens(num_tokens)
        if num_tokens < NUM_BEFORE_DEATH:
            engine.may_step.set()
    await engine.die()
