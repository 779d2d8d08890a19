"""Several worker processes behind one port: spread, told apart by nobody, replaced when they die, drained together."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import urllib.error
import urllib.request

import grpc
import psutil
import pytest

from fakes.fake_engine import FakeEngine
from free_ports import free_port
from frontend.metrics import ROWS
from otlp_receiver import receiving
from running_frontend import CHANNEL_OPTIONS, Failure, Stream, failure_of, request
from running_workers import RunningWorkers, running_workers
from scraped import OPENMETRICS, Scrape
from stepwire.v1 import admin_service_pb2, common_pb2
from stepwire.v1.generation_service_pb2 import AbortRequest

pytestmark = pytest.mark.slow

GENERATE = '{grpc_code="OK",grpc_method="/stepwire.v1.GenerationService/Generate"}'


async def fetch(port: int, path: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as response:
            return str(response.read().decode())

    return await asyncio.to_thread(get)


async def until_ready(running: RunningWorkers) -> None:
    """The supervisor hears of a worker that serves a little later than the log."""
    async with asyncio.timeout(30):
        while True:
            try:
                await fetch(running.metrics_port, "/readyz")
            except urllib.error.HTTPError as error:
                error.close()
            else:
                return


async def metric(running: RunningWorkers, name: str) -> float:
    """0 for what nobody has counted yet."""
    page = await fetch(running.metrics_port, "/metrics")
    [value] = re.findall(rf"^stepwire_frontend_{re.escape(name)} (\S+)$", page, re.MULTILINE) or [0]
    return float(value)


async def wait_for_metric(running: RunningWorkers, name: str, value: float) -> None:
    """Return when it has this value: of a worker whose answer is late the supervisor shows what it had before."""
    give_up = time.monotonic() + 30
    while (found := await metric(running, name)) != value:
        assert time.monotonic() < give_up, f"{name} is still {found} and not {value}"


async def test_workers_serve_as_one_frontend(engine: FakeEngine, tmp_path):
    http_port = free_port()
    flags = ("--engine-endpoints", engine.endpoint, "--http-port", str(http_port))
    async with running_workers(tmp_path, *flags) as running:
        await running.wait_until_serving()
        await until_ready(running)
        assert {hello.client_id[-2:] for hello in engine.hellos} == {"-0", "-1"}
        one, other = map(running.generation, await running.connect_to_each())
        for stub in (one, one, other):
            await stub.Generate(request())
        # Twice: asking does not count twice.
        await wait_for_metric(running, f"rpcs_handled_total{GENERATE}", 3)
        assert await metric(running, f"rpcs_handled_total{GENERATE}") == 3
        assert await metric(running, "workers") == 2
        assert "fake-model" in await fetch(http_port, "/v1/models")

        engine.may_step.clear()
        held = Stream(one.GenerateStream(request(request_id="mine", max_tokens=100)))
        assert (await held.next()).HasField("accepted")
        for stub in (one, other):
            failure: Failure = await failure_of(stub.Generate(request(request_id="mine")))
            assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
            assert failure.info.metadata["tokens_emitted"] == "0"
        stranger = await other.Abort(AbortRequest(request_ids=["mine"]), metadata=(("authorization", "Bearer x"),))
        assert list(stranger.inactive_request_ids) == ["mine"]
        aborted = await other.Abort(AbortRequest(request_ids=["mine", "no such"]))
        assert (list(aborted.aborted_request_ids), list(aborted.inactive_request_ids)) == (["mine"], ["no such"])
        assert (await held.rest())[-1].finished.reason == common_pb2.FINISH_REASON_CANCELLED
        engine.may_step.set()
        # The id is free again, everywhere.
        assert (await other.Generate(request(request_id="mine"))).completions[0].text


async def test_the_start_of_all_workers_is_one_trace(engine: FakeEngine, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with receiving() as (receiver, endpoint):
        flags = ("--engine-endpoints", engine.endpoint, "--otlp-endpoint", endpoint)
        async with running_workers(tmp_path, *flags) as running:
            await running.wait_until_serving()
            root = await asyncio.to_thread(receiver.find, lambda span: span.name == "startup" and not span.parent_id)
            spans = await asyncio.to_thread(receiver.wait_for, root.trace_id, 5)
    workers = [span for span in spans if span.parent_id == root.span_id]
    connects = [span for span in spans if span.name == "connect"]
    assert [span.name for span in workers] == ["startup"] * 2
    assert {span.parent_id for span in connects} == {span.span_id for span in workers}
    assert len({span.resource["process.pid"] for span in (root, *workers)}) == 3
    assert not any(span.is_error for span in spans)


async def test_a_killed_worker_is_replaced_while_the_other_serves_on(engine: FakeEngine, tmp_path):
    async with running_workers(tmp_path, "--engine-endpoints", engine.endpoint) as running:
        await running.wait_until_serving()
        first, _ = await running.connect_to_each()
        await running.generation(first).Generate(request())
        for channel in await running.connect_to_each():
            await running.generation(channel).Generate(request())
        await wait_for_metric(running, f"rpcs_handled_total{GENERATE}", 3)
        [pid] = await running.wait_for_log(r"worker 0 is process (\d+)")
        os.kill(int(pid), signal.SIGKILL)
        await running.wait_for_log("worker 0 has ended with code -9")
        num_answered, is_replaced = 0, False
        # New connections all the while: none finds a worker that can not serve.
        while not is_replaced:
            is_replaced = running.log.count("now SERVING") >= 3
            async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}", options=CHANNEL_OPTIONS) as channel:
                await running.generation(channel).Generate(request())
            num_answered += 1
        assert "worker 0 is process" in running.log.split("code -9")[1]
        await running.connect_to_each()
        await wait_for_metric(running, f"rpcs_handled_total{GENERATE}", 3 + num_answered)
        assert await metric(running, "worker_restarts_total") == 1
        # The supervisor hears of it a little later than its callers.
        await wait_for_metric(running, "workers", 2)
        for accept in ("text/plain", OPENMETRICS):
            (await asyncio.to_thread(Scrape, running.metrics_port, accept)).check_against(ROWS)
        await until_ready(running)

        admin = running.admin()
        engine.may_step.clear()
        channels = await running.connect_to_each()
        streams = [Stream(running.generation(channel).GenerateStream(request())) for channel in channels]
        for stream in streams:
            assert (await stream.next()).HasField("accepted")
        assert (await admin.Drain(admin_service_pb2.DrainRequest(timeout_ms=60_000))).requests_in_flight == 2
        status = await admin.GetDrainStatus(admin_service_pb2.GetDrainStatusRequest())
        assert (status.draining, status.requests_in_flight) == (True, 2)
        for channel in await running.connect_to_each():
            assert (await failure_of(running.generation(channel).Generate(request()))).reason == "DRAINING"
        running.process.send_signal(signal.SIGTERM)
        await running.wait_for_log("draining 2 workers")
        engine.may_step.set()
        for stream in streams:
            assert (await stream.rest())[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert await running.ended() == 0
        assert "Traceback" not in running.log
        assert len(engine.goodbyes) == 2


async def test_ports_are_not_shared_with_strangers(engine: FakeEngine, tmp_path):
    async with running_workers(tmp_path, "--engine-endpoints", engine.endpoint) as running:
        await running.wait_until_serving()
        for workers in ("1", "2"):
            async with running_workers(tmp_path, "--port", str(running.port), "--workers", workers) as second:
                assert await second.ended() == 1
                assert f"error: cannot listen on 127.0.0.1:{running.port}: port in use" in second.log
        flags = ("--admin-port", str(running.admin_port))
        async with running_workers(tmp_path, *flags) as third:
            assert await third.ended() == 1
            assert f"error: cannot listen on 127.0.0.1:{running.admin_port}: port in use" in third.log
            assert "worker 0 could not be started: it has ended with code 1" in third.log
        workers = [psutil.Process(pid) for pid in await running.pids()]
        running.process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, workers, timeout=30)
        assert not alive
