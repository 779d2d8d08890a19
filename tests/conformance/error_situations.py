"""What has to be so that a call ends with an error. Each makes the call it is given at the right time.

Owner: the event loop of the tests, which is also that of frontend and engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from conformance.error_worlds import RICH, World
from conformance.runners import Reply
from fakes.fake_engine import FakeEngine
from fakes.late_errors import fail_after, halt_after, written
from running_frontend import NOT_SERVING, request
from stepwire.engine.v1 import engine_core_pb2
from stepwire.grpc_errors import REASONS
from stepwire.v1 import common_pb2, generation_service_pb2

Call = Callable[[], Awaitable[Reply]]
Situation = Callable[[World, Call], Awaitable[Reply]]
NUM_TOKENS_BEFORE = 3


async def as_it_is(world: World, call: Call) -> Reply:
    return await call()


def _engine_error(reason: str, grpc_code: int) -> common_pb2.EngineError:
    return common_pb2.EngineError(reason=reason, message="odd", grpc_code=grpc_code, retryable=REASONS[reason][1])


def refused_by_the_engine(reason: str, grpc_code: int) -> Situation:
    """As the engine answers an add."""

    async def situation(world: World, call: Call) -> Reply:
        error = _engine_error(reason, grpc_code)
        world.engine.reject = lambda add: error
        return await call()

    return situation


def failed_in_the_engine(reason: str, grpc_code: int, after: int) -> Situation:
    """The request alone, after so many tokens."""

    async def situation(world: World, call: Call) -> Reply:
        error = _engine_error(reason, grpc_code)
        if not after:
            world.engine.fail = lambda add, index: error
            return await call()
        reply = asyncio.ensure_future(call())
        await fail_after(world.engine, world.frontend, after, error)
        return await reply

    return situation


async def same_id_in_flight(world: World, call: Call) -> Reply:
    world.engine.may_step.clear()
    first = world.frontend.stream(request(request_id="row"))
    await first.next()
    reply = await call()
    world.engine.may_step.set()
    await first.rest()
    return reply


async def all_places_taken(world: World, call: Call) -> Reply:
    """A generation of two choices fills the frontend of the guarded world."""
    world.engine.may_step.clear()
    sampling = common_pb2.SamplingParams(n=2, temperature=1)
    first = world.frontend.stream(request(sampling=sampling), metadata=(("authorization", f"Bearer {RICH}"),))
    await first.next()
    reply = await call()
    world.engine.may_step.set()
    await first.rest()
    return reply


async def until_it_is_refused(world: World, call: Call) -> Reply:
    """What the caller may still use is used up first."""
    while (reply := await call()).code == "OK":
        pass
    return reply


async def engine_dies_before_the_first_token(world: World, call: Call) -> Reply:
    world.engine.may_step.clear()
    return await _died(world, call, world.engine.wait_until(lambda: world.engine.num_live == 1))


async def engine_dies_after_tokens(world: World, call: Call) -> Reply:
    halt_after(world.engine, NUM_TOKENS_BEFORE)
    return await _died(world, call, written(world.engine, world.frontend, NUM_TOKENS_BEFORE))


async def _died(world: World, call: Call, its_time: Awaitable[None]) -> Reply:
    reply = asyncio.ensure_future(call())
    await its_time
    await world.engine.die("out of luck", "ValueError")
    await reply
    await world.revive()
    return reply.result()


async def engine_is_gone(world: World, call: Call) -> Reply:
    await world.engine.die("out of luck", "ValueError")
    await world.frontend.wait_for_health(NOT_SERVING)
    reply = await call()
    await world.revive()
    return reply


async def engine_drains(world: World, call: Call) -> Reply:
    world.engine.begin_drain()
    await world.frontend.wait_for_health(NOT_SERVING)
    reply = await call()
    await world.revive()
    return reply


async def steps_do_not_come(world: World, call: Call) -> Reply:
    world.engine.may_step.clear()
    return await call()


async def output_can_not_be_processed(world: World, call: Call) -> Reply:
    def poisoned(*args: object) -> None:
        raise RuntimeError("poison")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.frontend.process.frontend.model.output_processor, "_process", poisoned)
        return await call()


async def input_can_not_be_processed(world: World, call: Call) -> Reply:
    async def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.frontend.process.frontend.model.input_processor, "process", broken)
        return await call()


async def aborted_on_the_way_to_the_engine(world: World, call: Call) -> Reply:
    """While the prompt is still being prepared, the caller's Abort comes."""
    processor = world.frontend.process.frontend.model.input_processor
    process, has_come, may_go_on = processor.process, asyncio.Event(), asyncio.Event()

    async def slow(*args: object, **kwargs: object) -> object:
        has_come.set()
        await may_go_on.wait()
        return await process(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "process", slow)
        reply = asyncio.ensure_future(call())
        await has_come.wait()
        await world.frontend.generation.Abort(generation_service_pb2.AbortRequest(request_ids=["row"]))
        may_go_on.set()
        return await reply


def client_is_stopped(process_id: Callable[[], int]) -> Situation:
    """The process of the client gets no time until the frontend has given it up."""

    async def situation(world: World, call: Call) -> Reply:
        engine = world.engine
        engine.may_step.clear()
        reply = asyncio.ensure_future(call())
        await engine.wait_until(lambda: engine.num_live == 1)
        os.kill(process_id(), signal.SIGSTOP)
        try:
            engine.may_step.set()
            await engine.wait_until(lambda: _has_been_cut(engine))
        finally:
            os.kill(process_id(), signal.SIGCONT)
        return await reply

    return situation


def _has_been_cut(engine: FakeEngine) -> bool:
    return any(abort.reason == engine_core_pb2.ABORT_REASON_SLOW_CLIENT for abort in engine.aborts)
