"""Engines that die, hang, drain, differ and come back, as the callers of a frontend see it."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from pathlib import Path

import grpc
import pytest

from fakes.fake_engine import WAIT_S, FakeEngine
from fakes.small_tokenizer import metaspace_backend, write_model_dir
from frontend.engine_client import connection as connection_module
from frontend.engine_client.connection_state import ConnectionState, EngineRefusedError, EngineStartTimeout
from frontend.engine_client.utility_calls import is_error
from running_frontend import NOT_SERVING, SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire.engine.v1 import engine_core_pb2
from stepwire.v1 import common_pb2, control_pb2, model_service_pb2

Code = grpc.StatusCode


async def open_streams(frontend: RunningFrontend, num: int) -> list:
    streams = [frontend.stream(request(f"stream {number}", max_tokens=1000)) for number in range(num)]
    for stream in streams:
        await stream.next()
    return streams


@pytest.mark.regression(25)
@pytest.mark.regression("forward error fails all pending requests")
async def test_reported_death_ends_every_stream_with_its_cause(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    streams = await open_streams(frontend, 5)
    before = time.monotonic()
    await engine.die("out of luck", "ValueError")
    failures = await asyncio.gather(*(stream.failure() for stream in streams))

    # Less than it waits for a pong.
    assert time.monotonic() - before < 10
    for failure in failures:
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "ENGINE_DEAD")
        assert "out of luck" in failure.message
        told = failure.info.metadata
        assert (told["kind"], told["cause"], told["cause_type"]) == ("reported", "STEP_FAILED", "ValueError")
        assert (told["engine_id"], told["boot_id"], told["tokens_emitted"]) == ("fake-0", engine.ready.boot_id, "0")
        assert told["retryable"] == "true"
        assert failure.retry_info.retry_delay.ToMilliseconds() > 0
    await frontend.wait_for_health(NOT_SERVING)
    assert frontend.maps == (0, 0)
    assert frontend.process.frontend.pool.num_routes == 0
    assert frontend.metric("engine_deaths_total", engine_id="fake-0", kind="reported", cause="STEP_FAILED") == 1
    refused = await failure_of(frontend.generation.Generate(request()))
    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "ENGINE_DEAD")
    assert "out of luck" in refused.message


async def handlers_have_ended() -> None:
    """A caller reads its status a little before the task of its handler ends."""
    handlers = [task for task in asyncio.all_tasks() if "/GenerateStream" in task.get_name()]
    if handlers:
        _, at_work = await asyncio.wait(handlers, timeout=WAIT_S)
        assert not at_work


async def test_a_death_keeps_nothing_of_the_requests_it_ended(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    streams = await open_streams(frontend, 3)
    generations = [weakref.ref(one) for one in frontend.process.frontend._in_flight.values()]
    session = weakref.ref(frontend.process.frontend.pool.connections[0]._session)
    await engine.die()
    await asyncio.gather(*(stream.failure() for stream in streams))
    await frontend.wait_for_health(NOT_SERVING)
    await handlers_have_ended()

    gc.collect()
    assert frontend.process.frontend.pool.connections[0].last_error.__traceback__ is None
    assert [one() for one in generations] == [None] * 3
    assert session() is None


async def test_silent_death_after_tokens_is_not_retryable(frontend: RunningFrontend, engine: FakeEngine):
    stream = frontend.stream(request("a b c", max_tokens=1_000_000))
    while not (await stream.next()).HasField("delta"):
        pass
    engine.may_step.clear()
    await engine.kill()
    failure = await stream.failure()

    assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "ENGINE_DEAD")
    assert failure.info.metadata["kind"] == "transport"
    assert int(failure.info.metadata["tokens_emitted"]) > 0
    assert failure.info.metadata["retryable"] == "false"
    assert failure.retry_info.retry_delay.ToMilliseconds() == 0


async def test_frontend_comes_back_by_itself_when_the_engine_does(frontend: RunningFrontend, engine: FakeEngine):
    for _ in range(2):
        await engine.kill()
        await frontend.wait_for_health(NOT_SERVING)
        await engine.start(engine.port)
        await frontend.wait_for_health(SERVING)
        assert (await frontend.generation.Generate(request())).completions[0].text
    handles = [add.handle for add in engine.adds]
    assert len(set(handles)) == len(handles)
    assert len({hello.session_id for hello in engine.hellos}) == 1


async def test_engine_may_come_back_with_another_model(frontend: RunningFrontend, engine: FakeEngine, tmp_path):
    await frontend.generation.Generate(request("hello"))
    old = frontend.process.frontend.model
    await engine.kill()
    await frontend.wait_for_health(NOT_SERVING)
    directory = tmp_path / "other"
    directory.mkdir()
    other = FakeEngine(write_model_dir(directory, metaspace_backend()), model="another", engine_id="fake-1")
    async with other.running(engine.port):
        await frontend.wait_for_health(SERVING)
        answer = await frontend.generation.Generate(request("hello"))
        assert (answer.model, answer.completions[0].text) == ("another", " hello" * 4)
        refused = await failure_of(frontend.generation.Generate(request(model="fake-model")))
        assert refused.reason == "MODEL_NOT_FOUND"
        assert old.is_retired


async def test_weights_that_change_under_a_session_change_the_fingerprint_and_not_the_model(
    frontend: RunningFrontend, engine: FakeEngine
):
    before = await frontend.generation.Generate(request())
    model = frontend.process.frontend.model
    engine.ready.weight_version = "v2"
    # Its statistics come with what it generates.
    await frontend.generation.Generate(request())
    (connection,) = frontend.process.frontend.pool.connections
    await frontend.wait_until(lambda: connection.facts.weight_version == "v2")
    after = await frontend.generation.Generate(request())
    assert after.system_fingerprint != before.system_fingerprint
    # Prepared requests stay right, so that a new stream to the same engine costs nobody anything.
    await engine.kill()
    await frontend.wait_for_health(NOT_SERVING)
    await engine.start(engine.port)
    await frontend.wait_for_health(SERVING)
    assert frontend.process.frontend.model is model
    assert not model.is_retired


async def test_engine_that_answers_no_ping_is_dropped(engine: FakeEngine, tmp_path):
    engine.ready.ping_interval_ms, engine.ready.ping_timeout_ms = 100, 1500
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        stream = running.stream(request())
        await stream.next()
        engine.answers_pings = False
        failure = await stream.failure()
        assert (failure.reason, failure.info.metadata["kind"]) == ("ENGINE_DEAD", "heartbeat")


async def test_output_is_a_sign_of_life_where_pongs_do_not_come_and_silence_is_not(engine: FakeEngine, tmp_path):
    timeout_s = 1.0
    engine.ready.ping_interval_ms, engine.ready.ping_timeout_ms = 100, int(1000 * timeout_s)
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as running:
        await running.wait_for_health(SERVING)
        engine.may_step.clear()
        output = common_pb2.OutputOptions(token_ids=True)
        stream = running.stream(request(max_tokens=4000, output=output))
        await stream.next()
        engine.answers_pings = False
        began = time.monotonic()
        while time.monotonic() < began + 2 * timeout_s:
            engine.sessions[0].send_outputs([engine.adds[0].handle], [5])
            assert (await stream.next()).HasField("delta")
        failure = await stream.failure()
        assert (failure.reason, failure.info.metadata["kind"]) == ("ENGINE_DEAD", "heartbeat")


async def test_end_of_stream_without_a_word_is_a_death(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    (stream,) = await open_streams(frontend, 1)
    engine.sessions[0].end_without_a_word()
    failure = await stream.failure()
    assert (failure.reason, failure.info.metadata["kind"]) == ("ENGINE_DEAD", "transport")
    await frontend.wait_for_health(SERVING)


async def test_spoiled_batch_costs_the_session_and_not_the_frontend(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    (stream,) = await open_streams(frontend, 1)
    spoiled = engine_core_pb2.EngineCoreOutputs(batch_seq=2, handles=[1, 2], token_ids=[3])
    engine.sessions[0].send(engine_core_pb2.ConnectResponse(outputs=spoiled))
    assert (await stream.failure()).reason == "ENGINE_DEAD"
    engine.may_step.set()
    await frontend.wait_for_health(SERVING)
    await frontend.generation.Generate(request())


async def test_frames_of_unknown_kind_and_unknown_handles_are_skipped(frontend: RunningFrontend, engine: FakeEngine):
    await frontend.generation.Generate(request())
    session = engine.sessions[0]
    session.send(engine_core_pb2.ConnectResponse())
    session.send(engine_core_pb2.ConnectResponse(utility_result=engine_core_pb2.UtilityResult(call_id=7)))
    # A handle nobody has: one that was aborted a moment ago, for instance.
    session.send_outputs(handles=[10_000], token_ids=[5])
    assert (await frontend.generation.Generate(request())).completions[0].text


async def test_missing_batches_are_counted(frontend: RunningFrontend, engine: FakeEngine):
    assert frontend.metric("batch_gap_total", engine_id="fake-0") == 0
    engine.sessions[0].skip_batches(3)
    await frontend.generation.Generate(request())
    assert frontend.metric("batch_gap_total", engine_id="fake-0") == 3


async def test_drain_lets_requests_finish_and_refuses_new_ones(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    stream = frontend.stream(request(max_tokens=3))
    await stream.next()
    engine.begin_drain()
    await frontend.wait_for_health(NOT_SERVING)
    refused = await failure_of(frontend.generation.Generate(request()))
    engine.may_step.set()

    assert (refused.code, refused.reason) == (Code.UNAVAILABLE, "DRAINING")
    assert refused.retry_info.retry_delay.ToMilliseconds() > 0
    assert (await stream.rest())[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
    (connection,) = frontend.process.frontend.pool.connections
    await frontend.wait_until(lambda: connection.last_error is not None)
    assert connection.last_error.reason == "DRAINING"
    assert frontend.metric("engine_deaths_total", engine_id="fake-0", kind="transport", cause="") == 0


async def test_goodbye_is_said_at_the_end(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as running:
        await running.wait_for_health(SERVING)
    assert [goodbye.abort_running for goodbye in engine.goodbyes] == [True]


async def test_a_utility_call_after_goodbye_does_not_wait_for_a_result(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    stream = frontend.stream(request(max_tokens=3))
    await stream.next()
    (connection,) = frontend.process.frontend.pool.connections
    closing = asyncio.create_task(connection.close("test", abort_running=False))
    # The stream stays open as long as the request runs.
    await engine.wait_until(lambda: engine.goodbyes != [])
    async with asyncio.timeout(10):
        assert is_error(await connection.call_utility(control_pb2.IsPausedArgs(), None))
    assert not closing.done()
    engine.may_step.set()
    assert (await stream.rest())[-1].HasField("finished")
    await closing


async def test_stalled_engine_gets_no_new_requests_and_keeps_its_own(frontend: RunningFrontend, engine: FakeEngine):
    engine.may_step.clear()
    (stream,) = await open_streams(frontend, 1)
    engine.ready.state = common_pb2.ENGINE_STATE_STALLED
    engine.sessions[0].send_outputs()
    await frontend.wait_for_health(NOT_SERVING)
    refused = await failure_of(frontend.generation.Generate(request()))
    assert refused.code is Code.UNAVAILABLE
    assert "STALLED" in refused.message
    engine.ready.state = common_pb2.ENGINE_STATE_RUNNING
    engine.sessions[0].send_outputs()
    await frontend.wait_for_health(SERVING)
    stream.call.cancel()


@pytest.fixture
async def second_engine(tokenizer_dir: Path):
    async with FakeEngine(tokenizer_dir, engine_id="fake-1", vocab_size=400, max_model_len=100).running() as fake:
        yield fake


async def both_attached(running: RunningFrontend) -> None:
    connections = running.process.frontend.pool.connections
    await running.wait_until(lambda: all(connection.is_available for connection in connections))


async def test_requests_are_spread_and_the_smallest_context_counts(
    engine: FakeEngine, second_engine: FakeEngine, tmp_path
):
    async with running_frontend(engine.endpoint, second_engine.endpoint, cache_dir=tmp_path) as running:
        await both_attached(running)
        info = await running.models.GetModel(model_service_pb2.GetModelRequest())
        for one in (engine, second_engine):
            one.may_step.clear()
            # No stats before all are sent: it would be a matter of luck whose come first.
            one.may_admit.clear()
        opening = asyncio.create_task(open_streams(running, 8))
        async with asyncio.timeout(WAIT_S):
            while running.process.frontend.pool.num_routes < 8:  # noqa: ASYNC110  # a counter tells nobody
                await asyncio.sleep(0)
        for one in (engine, second_engine):
            one.may_admit.set()
        streams = await opening
        assert (len(engine.adds), len(second_engine.adds)) == (4, 4)
        # Each stats came with the news that a request is queued, and counts it.
        connections = running.process.frontend.pool.connections
        assert [connection.candidate.num_unreported for connection in connections] == [0, 0]
        for stream in streams:
            stream.call.cancel()
    assert info.model.max_model_len == 100


@pytest.mark.parametrize("reason", ["QUEUE_FULL", "DRAINING"])
async def test_refused_request_goes_to_another_engine_unnoticed(
    engine: FakeEngine, second_engine: FakeEngine, tmp_path, reason: str
):
    refusal = common_pb2.EngineError(reason=reason, message="no", grpc_code=8, retryable=True)
    engine.reject = lambda add: refusal
    async with running_frontend(engine.endpoint, second_engine.endpoint, cache_dir=tmp_path) as running:
        await both_attached(running)
        for _ in range(4):
            stream = running.stream(request())
            assert (await stream.next()).accepted.engine_id == "fake-1"
            assert (await stream.rest())[-1].HasField("finished")
        await running.wait_idle()
        labels = {"model_name": "fake-model", "finished_reason": "length"}
        assert running.metric("requests_finished_total", engine_id="fake-0", **labels) == 0
        assert running.metric("requests_finished_total", engine_id="fake-1", **labels) == 4
        # Nowhere else to go: the caller hears of it after one more try.
        second_engine.reject = lambda add: refusal
        failure = await failure_of(running.generation.Generate(request()))
        assert failure.reason == reason
    assert len(engine.adds) + len(second_engine.adds) <= 4 + 4 + 2


async def test_a_request_that_crosses_with_the_end_of_an_engine_goes_to_another_unnoticed(
    engine: FakeEngine, second_engine: FakeEngine, tmp_path
):
    async with running_frontend(engine.endpoint, second_engine.endpoint, cache_dir=tmp_path) as running:
        await both_attached(running)
        # The drain begins, and is over, between the arrival of a request and its answer.
        engine.may_admit.clear()
        engine.reject = lambda add: engine.begin_drain()
        streams = [running.stream(request()) for _ in range(2)]
        for stream in streams:
            assert (await stream.next()).accepted.engine_id == "fake-1"
            assert (await stream.rest())[-1].HasField("finished")
        assert running.metric("picker_decisions_total", reason="retry") == 1


async def test_a_caller_can_pin_a_rank(engine: FakeEngine, second_engine: FakeEngine, tmp_path):
    for rank, one in enumerate((engine, second_engine)):
        one.ready.data_parallel_rank, one.ready.data_parallel_size = rank, 2
    async with running_frontend(engine.endpoint, second_engine.endpoint, cache_dir=tmp_path) as running:
        await both_attached(running)
        for rank in ("1", "0", "1"):
            stream = running.stream(request(), metadata=(("x-data-parallel-rank", rank),))
            assert (await stream.next()).accepted.engine_id == f"fake-{rank}"
        assert running.metric("picker_decisions_total", reason="pinned") == 3
        for wrong in ("2", "-1", "one", "9" * 400):
            refused = running.generation.Generate(request(), metadata=(("x-data-parallel-rank", wrong),))
            failure = await failure_of(refused)
            assert (failure.code, failure.fields) == (Code.INVALID_ARGUMENT, ["x-data-parallel-rank"])


async def test_an_engine_of_another_protocol_is_told_apart(engine: FakeEngine, tmp_path):
    engine.ready.protocol = 7
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as running:
        (connection,) = running.process.frontend.pool.connections
        await running.wait_until(lambda: connection.last_error is not None)
        assert connection.last_error.reason == "PROTOCOL_VERSION"
        assert running.metric("engine_refusals_total", reason="PROTOCOL_VERSION") > 0


async def test_the_limits_of_an_engine_that_died_are_gone(engine: FakeEngine, second_engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, second_engine.endpoint, cache_dir=tmp_path) as running:
        await both_attached(running)
        connections = running.process.frontend.pool.connections
        await second_engine.kill()
        await running.wait_until(lambda: not connections[1].is_available)
        info = await running.models.GetModel(model_service_pb2.GetModelRequest())
        assert info.model.max_model_len == engine.ready.max_model_len


async def test_death_of_one_engine_costs_only_its_own_requests(engine: FakeEngine, second_engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, second_engine.endpoint, cache_dir=tmp_path) as running:
        await both_attached(running)
        engine.may_step.clear()
        second_engine.may_step.clear()
        streams = [running.stream(request()) for _ in range(4)]
        engine_ids = [(await stream.next()).accepted.engine_id for stream in streams]
        await engine.kill()
        second_engine.may_step.set()
        for stream, engine_id in zip(streams, engine_ids, strict=True):
            if engine_id == "fake-0":
                assert (await stream.failure()).info.metadata["engine_id"] == "fake-0"
            else:
                assert (await stream.rest())[-1].HasField("finished")
        assert set(engine_ids) == {"fake-0", "fake-1"}
        await running.generation.Generate(request())
        assert running.metric("engine_up", engine_id="fake-0") == 0
        assert running.metric("engine_up", engine_id="fake-1") == 1


async def test_the_fingerprint_is_that_of_the_engine_that_runs_the_request(
    engine: FakeEngine, second_engine: FakeEngine, tmp_path
):
    second_engine.ready.dtype = "bfloat16"
    async with running_frontend(engine.endpoint, second_engine.endpoint, cache_dir=tmp_path) as running:
        await both_attached(running)
        engine.may_step.clear()
        second_engine.may_step.clear()
        streams = [running.stream(request()) for _ in range(4)]
        accepted = [(await stream.next()).accepted for stream in streams]
        for stream in streams:
            stream.call.cancel()
    fingerprints = {(one.engine_id, one.system_fingerprint) for one in accepted}
    assert len(fingerprints) == len({fingerprint for _, fingerprint in fingerprints}) == 2


async def test_another_model_waits_until_the_requests_of_the_draining_one_have_ended(engine: FakeEngine, tmp_path):
    directory = tmp_path / "other"
    directory.mkdir()
    other = FakeEngine(write_model_dir(directory, metaspace_backend()), model="another", engine_id="fake-1")
    other.is_loaded.clear()
    async with (
        other.running(),
        running_frontend(engine.endpoint, other.endpoint, cache_dir=tmp_path / "cache") as running,
    ):
        first, second = running.process.frontend.pool.connections
        await running.wait_until(lambda: first.is_available)
        engine.may_step.clear()
        stream = running.stream(request(max_tokens=3))
        await stream.next()
        engine.begin_drain()
        await running.wait_until(lambda: first.state is ConnectionState.DRAINING)
        other.is_loaded.set()
        await running.wait_until(lambda: second.last_error is not None)
        assert isinstance(second.last_error, EngineRefusedError)
        engine.may_step.set()

        assert (await stream.rest())[-1].finished.reason == common_pb2.FINISH_REASON_LENGTH
        await running.wait_until(lambda: second.is_available)
        assert (await running.generation.Generate(request("hello"))).model == "another"


async def test_one_engine_under_two_names_is_attached_once(engine: FakeEngine, tmp_path):
    names = engine.endpoint, f"localhost:{engine.port}"
    async with running_frontend(*names, cache_dir=tmp_path) as running:
        connections = running.process.frontend.pool.connections
        await running.wait_until(lambda: any(connection.last_error for connection in connections))
        (refused,) = [connection for connection in connections if connection.last_error]
        (attached,) = [connection for connection in connections if connection is not refused]
        await running.wait_until(lambda: attached.is_available)
        assert f"is engine fake-0, which is attached at {attached.endpoint} already" in str(refused.last_error)
        await running.generation.Generate(request())
    assert len(engine.hellos) == 1


class Heard(logging.Handler):
    """Says when something was logged that contains a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.has_come = asyncio.Event()
        self._text = text

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.has_come.set()


async def test_an_engine_that_cannot_be_reached_is_named_with_its_reason_once(
    tokenizer_dir, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(connection_module, "INFO_POLL_S", 0.01)
    caplog.set_level(logging.INFO)
    engine = FakeEngine(tokenizer_dir)
    await engine.start()
    await engine.stop()
    heard = Heard(f"waiting for engine {engine.endpoint}: UNAVAILABLE")
    logger = logging.getLogger(connection_module.__name__)
    logger.addHandler(heard)
    try:
        async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache") as running:
            async with asyncio.timeout(WAIT_S):
                await heard.has_come.wait()
            await engine.start(engine.port)
            await running.wait_for_health(SERVING)
    finally:
        logger.removeHandler(heard)
        await engine.stop()
    said = [record.getMessage() for record in caplog.records if "waiting for engine" in record.getMessage()]
    assert said[0] == f"waiting for engine {engine.endpoint}"
    assert "refused" in said[1]
    assert len(said) == len(set(said))


async def test_an_engine_that_loads_for_too_long_is_a_start_timeout(engine: FakeEngine, tmp_path):
    engine.is_loaded.clear()
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, ready_timeout_s=0.3) as running:
        (connection,) = running.process.frontend.pool.connections
        await running.wait_until(lambda: connection.last_error is not None)
        assert isinstance(connection.last_error, EngineStartTimeout)
        assert "not ready within 0.3 s" in str(connection.last_error)
        failure = await failure_of(running.generation.Generate(request()))
        assert (failure.code, failure.reason) == (Code.UNAVAILABLE, "ENGINE_STARTING")
        assert "look at its log" in failure.message
        engine.is_loaded.set()
        await running.wait_for_health(SERVING)


async def test_engine_with_another_tokenizer_is_refused(engine: FakeEngine, tmp_path):
    directory = tmp_path / "other"
    directory.mkdir()
    other = FakeEngine(write_model_dir(directory, metaspace_backend()), engine_id="fake-1")
    async with (
        other.running(),
        running_frontend(engine.endpoint, other.endpoint, cache_dir=tmp_path / "cache") as running,
    ):
        first, second = running.process.frontend.pool.connections
        await running.wait_until(lambda: bool(first.last_error or second.last_error))
        assert [first.is_available, second.is_available].count(True) == 1
        assert "must agree" in str(first.last_error or second.last_error)
        assert running.metric("engine_refusals_total", reason="TOKENIZER_MISMATCH") > 0
        info = await running.models.GetServerInfo(model_service_pb2.GetServerInfoRequest())
        refused, serving = sorted(info.engines, key=lambda one: one.state == common_pb2.ENGINE_STATE_RUNNING)
        assert "must agree" in refused.detail
        assert serving.detail == ""


async def test_engine_that_refuses_the_frontend_is_told_apart(engine: FakeEngine, tmp_path):
    async with running_frontend(engine.endpoint, cache_dir=tmp_path, expect_model="another") as running:
        (connection,) = running.process.frontend.pool.connections
        await running.wait_until(lambda: connection.last_error is not None)
        assert "the model is fake-model, not another" in str(connection.last_error)
        assert running.metric("engine_refusals_total", reason="MODEL_MISMATCH") > 0
        failure = await failure_of(running.generation.Generate(request()))
        assert failure.reason == "ENGINE_STARTING"
        assert "not another" in failure.message
