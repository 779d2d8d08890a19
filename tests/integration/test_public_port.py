"""Options of the public port, each by its effect."""

from __future__ import annotations

import asyncio
import json
import socket

import grpc.aio
import psutil
import pytest

from fakes.fake_engine import FakeEngine
from free_ports import free_port
from running_frontend import SERVING, RunningFrontend, Stream, failure_of, request, running_frontend
from stepwire.engine.v1 import engine_core_pb2
from stepwire.v1 import generation_service_pb2_grpc, model_service_pb2


async def test_five_mebibytes_pass_the_transport_and_are_refused_by_their_length(frontend: RunningFrontend):
    failure = await failure_of(frontend.generation.Generate(request("a" * 5 * 1024 * 1024)))
    # gRPC's own limit of 4 MiB would answer RESOURCE_EXHAUSTED.
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED")
    assert "the context holds" in failure.message


async def test_a_burst_of_calls_reaches_the_handlers_and_none_is_dropped_on_the_way(frontend: RunningFrontend):
    # gRPC's own limit is 1 000 calls that wait to be taken up, above which it cancels some.
    requests = [model_service_pb2.ListModelsRequest()] * 2500
    answers = await asyncio.gather(*map(frontend.models.ListModels, requests), return_exceptions=True)
    assert [answer for answer in answers if isinstance(answer, Exception)] == []


async def test_a_storm_of_pings_is_cut_and_calmer_clients_are_not(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        calm = running.stream(request())
        await calm.next()
        pings = [("grpc.keepalive_time_ms", 500), ("grpc.http2.max_pings_without_data", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.process.port}", options=pings) as channel:
            stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
            failure = await failure_of(stub.Generate(request(), timeout=60))
        assert failure.code == grpc.StatusCode.UNAVAILABLE
        assert failure.message == "Too many pings"
        engine.may_step.set()
        assert (await calm.rest())[-1].HasField("finished")


# Hardly above what clients are promised, which is 10 s; gateways mostly wait for 30 s.
PING_INTERVAL_S = 12
# gRPC's default would cut at the fourth ping.
SILENCE_S = 52


@pytest.mark.slow
async def test_pings_of_a_patient_client_pass_a_long_silence(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        pings = [("grpc.keepalive_time_ms", PING_INTERVAL_S * 1000), ("grpc.http2.max_pings_without_data", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.process.port}", options=pings) as channel:
            stub = generation_service_pb2_grpc.GenerationServiceStub(channel)
            stream = Stream(stub.GenerateStream(request()))
            assert (await stream.next()).HasField("accepted")
            news = asyncio.ensure_future(stream.next())
            # The silence itself is what is tested.
            done, _ = await asyncio.wait({news}, timeout=SILENCE_S)
            assert not done
            engine.may_step.set()
            assert (await news).HasField("delta")
            assert (await stream.rest())[-1].HasField("finished")


async def test_a_client_of_http_that_reads_nothing_is_cut_and_costs_no_more_than_the_limit(
    engine: FakeEngine, tmp_path
):
    engine.ready.max_model_len = engine.ready.kv_cache_tokens = 100_000_000
    engine.tokens_per_step = 1000
    port, limit = free_port(), 1_000_000
    settings = {"http_port": port, "slow_client_bytes": limit}
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, **settings) as running:
        await running.wait_for_health(SERVING)
        before = psutil.Process().memory_info().rss
        body = {"prompt": "hello " * 60, "max_tokens": 90_000_000, "stream": True}
        with socket.socket() as client:
            # Little room on the way: what lies there is not the frontend's, and takes a busy machine long to fill.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.connect(("127.0.0.1", port))
            client.sendall(http_post("/v1/completions", body))
            await engine.wait_until(lambda: bool(engine.aborts))
            assert engine.aborts[0].reason == engine_core_pb2.ABORT_REASON_SLOW_CLIENT
            assert list(engine.aborts[0].handles) == [engine.adds[0].handle]
            grown = psutil.Process().memory_info().rss - before
        await running.wait_idle()
        assert running.metric("slow_client_cuts_total") == 1
        assert running.maps == (0, 0)
        # The engine, which is in this process too, and the buffers of sockets are in it.
        assert grown < 64 * limit


def http_post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    headers = f"POST {path} HTTP/1.1\r\nHost: frontend\r\nContent-Type: application/json\r\n"
    return f"{headers}Content-Length: {len(content)}\r\n\r\n".encode() + content
