"""Requests that end before their time: cancel, Abort, deadlines, slow clients. The engine hears of each at once."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from fakes.fake_engine import WAIT_S, FakeEngine
from frontend.api import answering
from frontend.api.generation import GenerationService
from running_frontend import SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire.engine.v1 import engine_core_pb2
from stepwire.errors import StepwireError
from stepwire.v1 import common_pb2, generation_service_pb2

Code = grpc.StatusCode


async def aborts_with(engine: FakeEngine, reason: int) -> list[int]:
    """Handles aborted for this reason, waiting for the first."""
    await engine.wait_until(lambda: any(abort.reason == reason for abort in engine.aborts))
    return [handle for abort in engine.aborts if abort.reason == reason for handle in abort.handles]


async def test_cancel_of_a_stream_aborts_every_choice(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    call = frontend.stream(request(sampling=common_pb2.SamplingParams(n=2, temperature=1)))
    await call.next()
    call.call.cancel()

    handles = await aborts_with(engine, engine_core_pb2.ABORT_REASON_CLIENT_CANCELLED)
    assert handles == [add.handle for add in engine.adds]
    await engine.wait_until(lambda: engine.num_live == 0)
    await frontend.wait_idle()
    assert frontend.maps == (0, 0)
    assert frontend.metric("requests_aborted_total", reason="client_cancelled") == 2


@pytest.mark.regression(3)
async def test_a_request_id_is_free_again_while_the_engine_is_in_a_step_of_the_aborted_one(
    frontend: RunningFrontend, engine: FakeEngine
):
    engine.may_step.clear()
    old = frontend.stream(request("a b", request_id="same", max_tokens=4))
    await old.next()
    await frontend.generation.Abort(generation_service_pb2.AbortRequest(request_ids=["same"]))
    assert (await old.rest())[-1].finished.reason == common_pb2.FINISH_REASON_CANCELLED
    new = frontend.stream(request("c", request_id="same", max_tokens=3))
    await new.next()
    first, second = (add.handle for add in engine.adds)
    assert first != second
    # News of the old one that come late reach nobody.
    engine.may_step.set()
    assert (await new.rest())[-1].finished.usage.completion_tokens == 3
    await engine.wait_until(lambda: engine.num_live == 0)
    assert frontend.maps == (0, 0)


async def test_cancel_of_a_unary_call_aborts(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    call = frontend.generation.Generate(request())
    await engine.wait_until(lambda: engine.num_live == 1)
    call.cancel()
    assert await aborts_with(engine, engine_core_pb2.ABORT_REASON_CLIENT_CANCELLED) == [engine.adds[0].handle]


async def test_lost_connection_aborts(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.process.port}") as channel:
        method = channel.unary_stream(
            "/stepwire.v1.GenerationService/GenerateStream",
            generation_service_pb2.GenerateRequest.SerializeToString,
            generation_service_pb2.GenerateStreamResponse.FromString,
        )
        await method(request()).read()
    await aborts_with(engine, engine_core_pb2.ABORT_REASON_CLIENT_CANCELLED)
    await frontend.wait_idle()


async def test_abort_ends_the_callers_own_request_as_cancelled(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    call = frontend.stream(request(request_id="mine"))
    await call.next()
    ids = ["mine", "unknown", "mine"]
    stranger = await frontend.generation.Abort(
        generation_service_pb2.AbortRequest(request_ids=ids), metadata=(("authorization", "Bearer other"),)
    )
    answer = await frontend.generation.Abort(generation_service_pb2.AbortRequest(request_ids=ids))
    again = await frontend.generation.Abort(generation_service_pb2.AbortRequest(request_ids=["mine"]))

    assert list(stranger.aborted_request_ids) == []
    assert (list(answer.aborted_request_ids), list(answer.inactive_request_ids)) == (["mine"], ["unknown"])
    messages = await call.rest()
    assert messages[-1].finished.reason == common_pb2.FINISH_REASON_CANCELLED
    assert messages[-1].finished.HasField("usage")
    assert len(again.aborted_request_ids) + len(again.inactive_request_ids) == 1
    assert await aborts_with(engine, engine_core_pb2.ABORT_REASON_REQUESTED) == [engine.adds[0].handle]


async def test_deadline_of_a_call_ends_it_here_and_in_the_engine(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    failure = await failure_of(frontend.generation.Generate(request(), timeout=0.5))
    assert failure.code is Code.DEADLINE_EXCEEDED
    await engine.wait_until(lambda: engine.num_live == 0)
    await frontend.wait_idle()
    assert frontend.maps == (0, 0)


async def run_with_deadline(frontend: RunningFrontend, deadline_in_s: float) -> StepwireError:
    """The error inside the server: on the way to the caller its own clock might be faster."""

    async def run() -> None:
        inner = frontend.process.frontend
        # Before its time begins: nothing waits from there to the engine.
        processed = await inner.model.input_processor.process(request(), request_id="r1")
        async with inner.generation("r1", caller="", deadline_in_s=deadline_in_s) as generation:
            generation.submit(processed)
            while await generation.next():
                pass

    with pytest.raises(StepwireError) as caught:
        await run()
    return caught.value


async def test_deadline_has_its_reason_and_the_facts(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    error = await run_with_deadline(frontend, 1.0)
    assert error.reason == "DEADLINE"
    assert error.metadata == {"request_id": "r1", "tokens_emitted": "0", "engine_id": "fake-0"}
    assert await aborts_with(engine, engine_core_pb2.ABORT_REASON_DEADLINE) == [engine.adds[0].handle]


async def test_deadline_holds_although_the_engine_is_stuck(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_admit.clear()
    assert (await run_with_deadline(frontend, 1.0)).reason == "DEADLINE"
    assert frontend.maps == (0, 0)
    engine.may_admit.set()
    assert await aborts_with(engine, engine_core_pb2.ABORT_REASON_DEADLINE) == [engine.adds[0].handle]


async def test_queue_timeout(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    failure = await failure_of(frontend.generation.Generate(request(queue_timeout_ms=50)))
    assert (failure.code, failure.reason) == (Code.DEADLINE_EXCEEDED, "QUEUE_TIMEOUT")


@pytest.mark.parametrize("limit", [{"slow_client_timeout_s": 0.4}, {"slow_client_bytes": 20_000}])
async def test_client_that_does_not_read_is_cut(engine: FakeEngine, tmp_path, limit: dict[str, float]):
    engine.ready.max_model_len = engine.ready.kv_cache_tokens = 100_000_000
    engine.tokens_per_step = 1000
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, **limit) as running:
        await running.wait_for_health(SERVING)
        slow = running.stream(request("hello " * 60, max_tokens=90_000_000))
        await slow.next()
        # Nobody reads on; what the transport takes is used up, and then output piles up in the frontend.
        handles = await aborts_with(engine, engine_core_pb2.ABORT_REASON_SLOW_CLIENT)
        assert handles == [engine.adds[0].handle]
        assert running.metric("slow_client_cuts_total") == 1

        failure = await slow.failure()
        assert (failure.code, failure.reason) == (Code.RESOURCE_EXHAUSTED, "SLOW_CLIENT")
        assert int(failure.info.metadata["tokens_emitted"]) > 0
        assert failure.info.metadata["retryable"] == "false"


async def test_a_client_that_does_not_read_the_last_output_is_cut(engine: FakeEngine, tmp_path):
    engine.ready.max_model_len = engine.ready.kv_cache_tokens = 100_000_000
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, slow_client_timeout_s=0.3) as running:
        await running.wait_for_health(SERVING)
        # Delta and end are taken together, and nothing comes after them.
        echo = common_pb2.OutputOptions(echo_prompt=True)
        slow = running.stream(request("hello world " * 40_000, max_tokens=1, output=echo))
        await engine.wait_until(lambda: bool(engine.adds))
        await running.wait_idle()
        assert running.metric("slow_client_cuts_total") == 1
        assert running.maps == (0, 0)
        slow.call.cancel()


async def test_a_slow_client_that_never_reads_holds_no_handler(engine: FakeEngine, tmp_path, monkeypatch):
    monkeypatch.setattr(answering, "STATUS_TIMEOUT_S", 0.05)
    engine.ready.max_model_len = engine.ready.kv_cache_tokens = 100_000_000
    engine.tokens_per_step = 1000
    method = "/stepwire.v1.GenerationService/GenerateStream"
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, slow_client_bytes=20_000) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        slow = running.stream(request("hello " * 60, max_tokens=90_000_000))
        await slow.next()
        handlers = [task for task in asyncio.all_tasks() if method in task.get_name()]
        assert len(handlers) == 1
        engine.may_step.set()
        _, still_running = await asyncio.wait(handlers, timeout=WAIT_S)
        assert not still_running
        await running.wait_for_metric(1, "rpcs_handled_total", grpc_method=method, grpc_code="RESOURCE_EXHAUSTED")
        assert running.maps == (0, 0)


class GoneContext:
    """Of a caller whose connection broke before any header was sent."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> tuple:
        return ()

    def time_remaining(self) -> None:
        return None

    async def send_initial_metadata(self, headers: object) -> None:
        raise grpc.aio.InternalError("the connection is gone")

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> None:
        self.code = code
        raise grpc.aio.AbortError


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_client_that_goes_at_admission_is_no_failure_of_ours(
    frontend: RunningFrontend, engine: FakeEngine, caplog, method: str
):
    context = GoneContext()
    with pytest.raises(grpc.aio.AbortError):
        await getattr(GenerationService(frontend.process.frontend), method)(request(), context)
    assert context.code is Code.CANCELLED
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    model = {"model_name": "fake-model", "engine_id": "fake-0"}
    assert frontend.metric("requests_finished_total", finished_reason="error", **model) == 0


async def test_storm_of_cancels_leaves_nothing_behind(frontend: RunningFrontend, engine: FakeEngine):
    async def one(number: int) -> None:
        call = frontend.stream(request(f"number {number}", max_tokens=200))
        for _ in range(number % 7):
            await call.next()
        if number % 3:
            call.call.cancel()
        else:
            await call.rest()

    await asyncio.gather(*(one(number) for number in range(60)))
    await frontend.wait_idle()
    await engine.wait_until(lambda: engine.num_live == 0)
    assert frontend.maps == (0, 0)
    model = {"model_name": "fake-model", "engine_id": "fake-0"}
    ends = {
        reason: frontend.metric("requests_finished_total", finished_reason=reason, **model)
        for reason in ("stop", "length", "abort", "error", "rejected", "repetition")
    }
    assert ends["length"] >= 20
    assert ends["error"] == ends["rejected"] == 0
    # Every request that reached the engine ended exactly once.
    assert sum(ends.values()) == len(engine.adds)
