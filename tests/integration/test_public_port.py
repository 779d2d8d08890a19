"""Options of the public port, each by its effect."""

from __future__ import annotations

import asyncio

import grpc.aio

from fakes.fake_engine import FakeEngine
from running_frontend import SERVING, RunningFrontend, failure_of, request, running_frontend
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
            failure = await failure_of(stub.Generate(request(), timeout=20))
        assert failure.code == grpc.StatusCode.UNAVAILABLE
        assert failure.message == "Too many pings"
        engine.may_step.set()
        assert (await calm.rest())[-1].HasField("finished")
