"""Ages and idleness of connections to the public port by their effect, with the production options' times shortened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fakes.fake_engine import WAIT_S, FakeEngine
from running_frontend import CHANNEL_OPTIONS, SERVING, RunningFrontend, Stream, failure_of, request, running_frontend
from stepwire import grpc_options
from stepwire.v1 import generation_service_pb2_grpc

READY = grpc.ChannelConnectivity.READY
SHORT_MS, LONG_MS = 400, 600_000


@asynccontextmanager
async def shortened(engine: FakeEngine, cache_dir: Path, **times_ms: int) -> AsyncIterator[RunningFrontend]:
    """A frontend whose options are those of production but for these times, which have to be among them."""
    options = dict(grpc_options.PUBLIC_SERVER)
    for name, time_ms in times_ms.items():
        assert f"grpc.{name}_ms" in options
        options[f"grpc.{name}_ms"] = time_ms
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc_options, "PUBLIC_SERVER", list(options.items()))
        async with running_frontend(engine.endpoint, cache_dir=cache_dir) as running:
            yield running


@asynccontextmanager
async def connection(running: RunningFrontend) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.process.port}", options=CHANNEL_OPTIONS) as channel:
        async with asyncio.timeout(WAIT_S):
            await channel.channel_ready()
        yield channel


def stream_of(channel: grpc.aio.Channel) -> Stream:
    return Stream(generation_service_pb2_grpc.GenerationServiceStub(channel).GenerateStream(request()))


async def wait_told_to_leave(channel: grpc.aio.Channel) -> None:
    """Until the server has asked the client to make a new connection."""
    async with asyncio.timeout(WAIT_S):
        await channel.wait_for_state_change(READY)


async def test_an_old_connection_is_left_and_what_runs_on_it_ends_as_it_should(engine: FakeEngine, tmp_path):
    async with shortened(engine, tmp_path, max_connection_age=SHORT_MS, max_connection_age_grace=LONG_MS) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        async with connection(running) as channel:
            stream = stream_of(channel)
            await stream.next()
            await wait_told_to_leave(channel)
            # On a new connection; balancers see the client anew.
            other = stream_of(channel)
            await other.next()
            engine.may_step.set()
            for one in (stream, other):
                assert (await one.rest())[-1].HasField("finished")


async def test_what_still_runs_at_the_end_of_the_grace_of_an_old_connection_ends_unavailable(
    engine: FakeEngine, tmp_path
):
    async with shortened(engine, tmp_path, max_connection_age=SHORT_MS, max_connection_age_grace=SHORT_MS) as running:
        # A Watch would be cut as well.
        await running.wait_until(lambda: running.process.frontend.is_serving)
        engine.may_step.clear()
        async with connection(running) as channel:
            async with asyncio.timeout(WAIT_S):
                failure = await failure_of(stream_of(channel).rest())
            assert failure.code is grpc.StatusCode.UNAVAILABLE
        # The engine is told as after any disconnect.
        await running.wait_idle()
        await engine.wait_until(lambda: engine.num_live == 0)


async def test_an_idle_connection_is_closed_and_one_with_a_silent_stream_is_not(engine: FakeEngine, tmp_path):
    async with shortened(engine, tmp_path, max_connection_idle=SHORT_MS) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        async with connection(running) as busy:
            stream = stream_of(busy)
            await stream.next()
            async with connection(running) as idle:
                await wait_told_to_leave(idle)
            assert busy.get_state() is READY
            engine.may_step.set()
            assert (await stream.rest())[-1].HasField("finished")


def test_the_engine_port_has_neither_age_nor_idleness():
    assert not [name for name, _ in grpc_options.SERVER if "max_connection" in name]
