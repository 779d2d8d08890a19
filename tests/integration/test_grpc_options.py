"""Options of the public port and of the channel to an engine by their effect, with production's times shortened."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fakes.fake_engine import WAIT_S, FakeEngine
from fakes.tcp_forwarder import TcpForwarder, forwarder
from frontend.engine_client.channel import open_channel
from frontend.engine_client.connection_state import ClientIdentity
from running_frontend import CHANNEL_OPTIONS, SERVING, RunningFrontend, Stream, failure_of, request, running_frontend
from stepwire import grpc_options
from stepwire.engine.v1 import engine_core_pb2, engine_core_pb2_grpc
from stepwire.grpc_options import MAX_MESSAGE_BYTES
from stepwire.v1 import generation_service_pb2_grpc

READY = grpc.ChannelConnectivity.READY
IDENTITY = ClientIdentity("test", "session", "")
SHORT_MS, CALM_MS = 200, 400
SILENCE_MS = 500
# Of a machine that is busy with other things, a pong takes a while.
PONG_MS = 2000
KEEPALIVE = {
    "grpc.http2.ping_timeout_ms": PONG_MS,
    "grpc.keepalive_time_ms": SILENCE_MS,
    "grpc.keepalive_timeout_ms": PONG_MS,
}
MIN_PING_INTERVAL = "grpc.http2.min_ping_interval_without_data_ms"
# On the wire: nine bytes of head and eight of content.
PING_BYTES = 17


def shorten(patch: pytest.MonkeyPatch, which: str, times_ms: Mapping[str, int]) -> None:
    """These times of production's options `which`, which have to be among them."""
    options = dict(getattr(grpc_options, which))
    assert set(times_ms) <= set(options)
    options.update(times_ms)
    patch.setattr(grpc_options, which, list(options.items()))


def channel_to(port: int, *options: tuple[str, int]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[*CHANNEL_OPTIONS, *options])


def generation(channel: grpc.aio.Channel) -> generation_service_pb2_grpc.GenerationServiceStub:
    return generation_service_pb2_grpc.GenerationServiceStub(channel)


async def test_a_request_above_the_bound_is_refused_and_the_connection_lives(
    frontend: RunningFrontend, engine: FakeEngine
):
    engine.may_step.clear()
    async with (
        forwarder(frontend.process.port) as forwarding,
        channel_to(forwarding.port, ("grpc.max_send_message_length", -1)) as channel,
    ):
        stream = Stream(generation(channel).GenerateStream(request()))
        await stream.next()
        failure = await failure_of(generation(channel).Generate(request("a" * MAX_MESSAGE_BYTES)))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_MESSAGE_BYTES) in failure.message
        engine.may_step.set()
        assert (await stream.rest())[-1].HasField("finished")
        assert forwarding.num_connections == 1


async def lose(forwarding: TcpForwarder, *, after_silence: bool) -> None:
    """From now on nothing passes; without a silence before, a ping of gRPC's flow control may be on its way."""
    if after_silence:
        before = forwarding.num_bytes_in
        await forwarding.wait_until(lambda: forwarding.num_bytes_in >= before + 4 * PING_BYTES)
    forwarding.fall_silent()


@pytest.mark.parametrize("after_silence", [False, True])
async def test_a_client_that_the_network_has_lost_is_noticed_and_its_request_aborted(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_silence: bool
):
    shorten(monkeypatch, "PUBLIC_SERVER", KEEPALIVE)
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        async with forwarder(running.process.port) as forwarding, channel_to(forwarding.port) as channel:
            await Stream(generation(channel).GenerateStream(request())).next()
            await lose(forwarding, after_silence=after_silence)
            await engine.wait_until(lambda: bool(engine.aborts))
            await running.wait_idle()
            assert list(engine.aborts[0].handles) == [engine.adds[0].handle]
            assert running.maps == (0, 0)


@pytest.mark.parametrize("after_silence", [False, True])
async def test_an_engine_that_the_network_has_lost_is_noticed_and_found_again(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_silence: bool
):
    shorten(monkeypatch, "ENGINE_CHANNEL", KEEPALIVE)
    shorten(monkeypatch, "SERVER", {MIN_PING_INTERVAL: SILENCE_MS // 2})
    engine = FakeEngine(tokenizer_dir, vocab_size=400)
    # By its own pings the frontend would notice it as well.
    engine.ready.ping_interval_ms = engine.ready.ping_timeout_ms = 600_000
    async with engine.running(), forwarder(engine.port) as forwarding:
        cache_dir = tmp_path / "cache"
        async with running_frontend(forwarding.endpoint, cache_dir=cache_dir) as running:
            await running.wait_for_health(SERVING)
            engine.may_step.clear()
            stream = running.stream(request())
            await stream.next()
            await lose(forwarding, after_silence=after_silence)
            failure = await stream.failure()
            assert (failure.reason, failure.info.metadata["kind"]) == ("ENGINE_DEAD", "transport")
            engine.may_step.set()
            await running.wait_for_health(SERVING)
            await running.generation.Generate(request())


async def test_an_idle_client_may_ping_at_the_interval_that_is_allowed(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shorten(monkeypatch, "PUBLIC_SERVER", {MIN_PING_INTERVAL: SHORT_MS})
    pings = [("grpc.keepalive_time_ms", CALM_MS), ("grpc.keepalive_permit_without_calls", 1)]
    pings.append(("grpc.http2.max_pings_without_data", 0))
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as running:
        await running.wait_for_health(SERVING)
        async with forwarder(running.process.port) as forwarding, channel_to(forwarding.port, *pings) as channel:
            async with asyncio.timeout(WAIT_S):
                await channel.channel_ready()
            before = forwarding.num_bytes_in
            # gRPC without the permission cuts at the third ping.
            await forwarding.wait_until(lambda: forwarding.num_bytes_in >= before + 5 * PING_BYTES)
            assert channel.get_state() is READY
            await generation(channel).Generate(request())
            assert forwarding.num_connections == 1


async def answer_of(channel: grpc.aio.Channel) -> engine_core_pb2.Ready:
    stub = engine_core_pb2_grpc.EngineCoreServiceStub(channel)
    return (await stub.GetEngineInfo(engine_core_pb2.GetEngineInfoRequest(), wait_for_ready=True)).ready


async def test_the_pauses_between_attempts_to_reach_an_engine_grow_to_their_bound_and_no_further(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    shorten(monkeypatch, "ENGINE_CHANNEL", {"grpc.max_reconnect_backoff_ms": CALM_MS})
    async with forwarder(engine.port) as forwarding, open_channel(forwarding.endpoint, IDENTITY) as channel:
        forwarding.is_open = False
        answer = asyncio.ensure_future(answer_of(channel))
        # With gRPC's own bound the last of so many pauses alone would be a minute.
        await forwarding.wait_until(lambda: forwarding.num_connections >= 12)
        forwarding.is_open = True
        assert await answer == engine.ready


async def count_connections(forwarding: TcpForwarder, channels: list[grpc.aio.Channel]) -> int:
    await asyncio.gather(*map(answer_of, channels))
    return forwarding.num_connections


async def test_two_channels_to_one_engine_have_a_connection_each(engine: FakeEngine):
    async with forwarder(engine.port) as forwarding:
        channels = [open_channel(forwarding.endpoint, IDENTITY) for _ in range(2)]
        assert await count_connections(forwarding, channels) == len(channels)
        for channel in channels:
            await channel.close()
