"""AdminService from its own port through the frontend to two real engine processes around the fake executor."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from safetensors.numpy import save_file

from fakes.fake_engine import WAIT_S
from fakes.fake_executor import FAKE_WEIGHTS, SLOW_TOKEN, next_token
from frontend.admin_server import SERVICE_NAME
from frontend.engine_client import utility_calls
from frontend.engine_client.engine_facts import EngineState
from frontend.engine_client.fan_out import MAX_ARGS_BYTES
from running_engine import RunningEngine, running_engine
from running_frontend import SERVING, RunningFrontend, failure_of, running_frontend
from stepwire.v1 import admin_service_pb2 as pb
from stepwire.v1 import admin_service_pb2_grpc, common_pb2, control_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest
from stepwire_client import cli

pytestmark = pytest.mark.slow

FIRST, SECOND = "engine-1", "engine-2"


class Admin:
    """The admin port, and what is behind it."""

    def __init__(self, frontend: RunningFrontend, engines: list[RunningEngine]) -> None:
        self.frontend = frontend
        self.engines = engines
        self.target = f"127.0.0.1:{frontend.process.admin_port}"
        self.channel = grpc.aio.insecure_channel(self.target, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = admin_service_pb2_grpc.AdminServiceStub(self.channel)

    async def results(self, method: str, engine_ids: tuple[str, ...] = (), **args: object) -> dict[str, object]:
        """Results by engine id; none may have failed."""
        response = await self.call(method, engine_ids, **args)
        assert not response.errors
        return dict(response.results)

    async def errors(self, method: str, engine_ids: tuple[str, ...] = (), **args: object) -> dict[str, str]:
        """Reasons by engine id; none may have worked."""
        response = await self.call(method, engine_ids, **args)
        assert not response.results
        return {engine_id: error.reason for engine_id, error in response.errors.items()}

    async def call(self, method: str, engine_ids: tuple[str, ...] = (), timeout_s: float = 30, **args: object):
        request = getattr(pb, f"{method}Request")(engines={"engine_ids": engine_ids}, args=args)
        return await getattr(self.stub, method)(request, timeout=timeout_s)

    @property
    def states(self) -> dict[str, EngineState]:
        connections = self.frontend.process.frontend.pool.connections
        return {connection.engine_id: connection.engine_state for connection in connections}

    async def wait_for_states(self, **states: EngineState) -> None:
        wanted = {name.replace("_", "-"): state for name, state in states.items()}
        await self.frontend.wait_until(lambda: wanted.items() <= self.states.items())

    async def cli(self, *arguments: str) -> SimpleNamespace:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", cli.__name__, "admin", *arguments, "--target", self.target),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return SimpleNamespace(code=process.returncode, out=out.decode(), err=err.decode())


@pytest.fixture
async def admin(tokenizer_dir: Path, tmp_path: Path) -> AsyncIterator[Admin]:
    flags = ("--num-blocks", "64", "--max-model-len", "-1", "--profile-dir", str(tmp_path / "profiles"))
    flags += ("--trusted-dirs", str(tmp_path / "weights"), "--fake-slow-step-s", "0.01")
    with running_engine("--engine-id", FIRST, *flags) as one, running_engine("--engine-id", SECOND, *flags) as two:
        endpoints = [f"127.0.0.1:{engine.port}" for engine in (one, two)]
        async with running_frontend(*endpoints, cache_dir=tmp_path / "cache", tokenizer=str(tokenizer_dir)) as frontend:
            await frontend.wait_for_health(SERVING)
            admin = Admin(frontend, [one, two])
            await admin.wait_for_states(engine_1=EngineState.RUNNING, engine_2=EngineState.RUNNING)
            yield admin
            await admin.channel.close()


def slow_request(max_tokens: int = 900) -> GenerateRequest:
    """Takes seconds, so that it is surely running whatever the test does to it."""
    request = GenerateRequest(token_ids=common_pb2.TokenIds(ids=[SLOW_TOKEN, 5, 6]))
    request.stop.max_tokens = max_tokens
    request.stop.ignore_eos = True
    request.sampling.temperature = 0
    return request


async def test_every_engine_answers_and_one_can_be_named(admin: Admin) -> None:
    tasks = await admin.results("GetSupportedTasks")
    assert set(tasks) == {FIRST, SECOND}
    assert all(list(result.tasks) == ["generate", "embed"] for result in tasks.values())
    metadata = (await admin.results("GetKvCacheMetadata", (SECOND,)))[SECOND]
    assert (metadata.block_size, metadata.num_blocks, metadata.groups[0].kind) == (16, 64, "full")
    health = (await admin.results("CheckHealth", (FIRST,)))[FIRST]
    assert not health.healthy
    assert [(worker.rank, worker.healthy) for worker in health.workers] == [(0, True), (1, False)]
    dumps = await admin.results("DumpState")
    assert {dump.state for dump in dumps.values()} == {common_pb2.ENGINE_STATE_RUNNING}
    assert len({dump.boot_id for dump in dumps.values()}) == 2


async def test_an_engine_that_is_not_there(admin: Admin) -> None:
    failure = await failure_of(admin.call("IsPaused", ("nobody",)))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "ENGINE_NOT_FOUND")
    response = await admin.call("IsPaused", ("nobody", FIRST))
    assert set(response.results) == {FIRST}
    assert {name: error.reason for name, error in response.errors.items()} == {"nobody": "ENGINE_NOT_FOUND"}


async def test_pause_and_resume_one_engine_while_the_other_serves(admin: Admin) -> None:
    paused = await admin.results("Pause", (FIRST,), mode=control_pb2.PAUSE_MODE_KEEP)
    assert paused[FIRST].held_requests == 0
    states = await admin.results("IsPaused")
    assert (states[FIRST].paused, states[FIRST].mode) == (True, control_pb2.PAUSE_MODE_KEEP)
    assert not states[SECOND].paused
    await admin.wait_for_states(engine_1=EngineState.PAUSED)
    channel = admin.engines[0].channel
    check = health_pb2.HealthCheckRequest(service="stepwire.engine.v1.EngineCoreService")
    assert health_pb2_grpc.HealthStub(channel).Check(check).status == SERVING
    assert await admin.errors("Pause", (FIRST,), mode=control_pb2.PAUSE_MODE_WAIT) == {FIRST: "ENGINE_PAUSED"}
    resumed = await admin.results("Resume")
    assert (resumed[FIRST].resumed, resumed[SECOND].resumed) == (True, False)
    await admin.wait_for_states(engine_1=EngineState.RUNNING)


async def test_a_kept_stream_goes_on_with_the_same_tokens(admin: Admin) -> None:
    request = slow_request(400)
    request.output.token_ids = True
    known = list(request.token_ids.ids)
    for _ in range(request.stop.max_tokens):
        known.append(next_token(known))
    stream = admin.frontend.stream(request)
    await stream.next()
    first = await stream.next()
    held = await admin.results("Pause", mode=control_pb2.PAUSE_MODE_KEEP, clear_cache=True)
    assert sum(result.held_requests for result in held.values()) == 1
    await admin.results("Resume")
    messages = [first, *await stream.rest()]
    token_ids = [token_id for message in messages for token_id in message.delta.token_ids]
    assert token_ids == known[len(request.token_ids.ids) :]


async def test_pause_abort_ends_the_stream_of_the_caller(admin: Admin) -> None:
    stream = admin.frontend.stream(slow_request())
    await stream.next()
    await stream.next()
    aborted = await admin.results("Pause", mode=control_pb2.PAUSE_MODE_ABORT)
    assert sum(result.aborted_requests for result in aborted.values()) == 1
    failure = await stream.failure()
    # Resumable: an operator's abort is not the caller's.
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert "paused" in failure.message
    assert int(failure.info.metadata["tokens_emitted"]) > 0
    await admin.frontend.wait_idle()


async def test_a_pause_that_takes_too_long_is_deadline_exceeded_of_that_engine(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = admin.frontend.stream(slow_request())
    await stream.next()
    await stream.next()
    # The engine gets two seconds; the usual margin is less than its answer may need on its way.
    monkeypatch.setattr(utility_calls, "ENGINE_MARGIN_S", 28)
    response = await admin.call("Pause", timeout_s=30, mode=control_pb2.PAUSE_MODE_WAIT)
    monkeypatch.undo()
    (error,) = response.errors.values()
    assert (error.reason, error.grpc_code) == ("DEADLINE", grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
    assert len(response.results) == 1
    busy = next(iter(response.errors))
    assert (await admin.results("IsPaused"))[busy].pending
    assert await admin.errors("Resume", (busy,)) == {busy: "PAUSE_PENDING"}
    stream.call.cancel()
    # The engine becomes idle, the late result finds nobody, and the next calls work.
    while (await admin.results("IsPaused"))[busy].pending:
        pass
    await admin.results("Resume")


@pytest.mark.regression("utility pending at death")
async def test_pending_calls_fail_at_once_when_their_engine_dies(admin: Admin) -> None:
    stream = admin.frontend.stream(slow_request())
    await stream.next()
    await stream.next()
    pausing = asyncio.ensure_future(admin.call("Pause", mode=control_pb2.PAUSE_MODE_WAIT))
    dumps = await admin.results("DumpState", include_requests=True)
    (busy,) = [name for name, dump in dumps.items() if dump.requests]
    victim = admin.engines[(FIRST, SECOND).index(busy)]
    victim.process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(10):
        response = await pausing
    error = response.errors[busy]
    assert (error.reason, error.grpc_code) == ("ENGINE_DEAD", grpc.StatusCode.UNAVAILABLE.value[0])
    assert set(response.results) == {FIRST, SECOND} - {busy}
    assert (await stream.failure()).reason == "ENGINE_DEAD"


async def test_sleep_takes_an_engine_out_of_rotation_and_waking_brings_it_back(admin: Admin) -> None:
    offload = {"level": control_pb2.SLEEP_LEVEL_OFFLOAD_WEIGHTS, "pause_mode": control_pb2.PAUSE_MODE_KEEP}
    assert (await admin.results("Sleep", **offload))[FIRST].freed_bytes == 2000
    await admin.wait_for_states(engine_1=EngineState.SLEEPING, engine_2=EngineState.SLEEPING)
    failure = await failure_of(admin.frontend.generation.Generate(slow_request(1)))
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    sleeping = (await admin.results("IsSleeping"))[SECOND]
    assert (sleeping.sleeping, sleeping.level, len(sleeping.asleep)) == (True, offload["level"], 3)
    partly = await admin.results("WakeUp", (FIRST,), tags=[control_pb2.WAKE_TAG_KV_CACHE])
    assert list(partly[FIRST].still_asleep) == [control_pb2.WAKE_TAG_WEIGHTS, control_pb2.WAKE_TAG_SCHEDULING]
    assert await admin.errors("Resume", (FIRST,)) == {FIRST: "ENGINE_SLEEPING"}
    awake = await admin.results("WakeUp")
    assert not any(result.still_asleep for result in awake.values())
    await admin.wait_for_states(engine_1=EngineState.RUNNING, engine_2=EngineState.RUNNING)
    await admin.frontend.generation.Generate(slow_request(1))


@pytest.mark.parametrize(
    ("method", "args", "reason", "code"),
    [
        ("Pause", {}, "FIELD_INVALID", grpc.StatusCode.INVALID_ARGUMENT),
        ("Sleep", {"level": 1}, "FIELD_INVALID", grpc.StatusCode.INVALID_ARGUMENT),
        ("ReloadWeights", {}, "ENGINE_NOT_PAUSED", grpc.StatusCode.FAILED_PRECONDITION),
        ("UpdateWeights", {"update_id": "no"}, "WEIGHT_UPDATE_UNKNOWN", grpc.StatusCode.FAILED_PRECONDITION),
        ("StopProfile", {}, "PROFILE_NOT_RUNNING", grpc.StatusCode.FAILED_PRECONDITION),
        ("StartProfile", {"prefix": "../up"}, "FIELD_INVALID", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_refusals_carry_reason_and_code(admin: Admin, method: str, args: dict, reason: str, code) -> None:
    response = await admin.call(method, **args)
    assert set(response.errors) == {FIRST, SECOND}
    assert {(error.reason, error.grpc_code) for error in response.errors.values()} == {(reason, code.value[0])}


async def test_reset_prefix_cache_says_whether_it_could(admin: Admin) -> None:
    stream = admin.frontend.stream(slow_request())
    await stream.next()
    await stream.next()
    results = await admin.results("ResetPrefixCache")
    assert sorted((result.reset, result.blocks_in_use > 0) for result in results.values()) == [
        (False, True),
        (True, False),
    ]
    forced = await admin.results("ResetPrefixCache", reset_running_requests=True)
    assert all(result.reset for result in forced.values())
    stream.call.cancel()


async def test_profiles_lie_in_the_directory_of_each_engine(admin: Admin, tmp_path: Path) -> None:
    started = await admin.results("StartProfile", (FIRST,), prefix="mine")
    assert started[FIRST].output_dir == str(tmp_path / "profiles")
    assert await admin.errors("StartProfile", (FIRST,)) == {FIRST: "PROFILE_RUNNING"}
    (file,) = (await admin.results("StopProfile", (FIRST,)))[FIRST].files
    assert Path(file).name in [path.name for path in (tmp_path / "profiles").iterdir()]


async def test_drain_refuses_new_requests_and_lets_the_running_one_finish(admin: Admin) -> None:
    stream = admin.frontend.stream(slow_request(200))
    await stream.next()
    # It runs for as long as the test needs it.
    await admin.results("Pause", mode=control_pb2.PAUSE_MODE_KEEP)
    assert not (await admin.stub.GetDrainStatus(pb.GetDrainStatusRequest())).draining
    begun = await admin.stub.Drain(pb.DrainRequest(timeout_ms=30_000, reason="test"))
    assert begun.requests_in_flight == 1
    status = await admin.stub.GetDrainStatus(pb.GetDrainStatusRequest())
    assert (status.draining, status.requests_in_flight) == (True, 1)
    assert 0 < status.remaining_ms <= 30_000
    failure = await failure_of(admin.frontend.generation.Generate(slow_request(1)))
    assert failure.reason == "DRAINING"
    await admin.results("Resume")
    assert (await stream.rest())[-1].WhichOneof("event") == "finished"
    status = await admin.stub.GetDrainStatus(pb.GetDrainStatusRequest())
    assert (status.requests_in_flight, status.remaining_ms) == (0, 0)


async def test_a_drain_cuts_what_still_runs_at_its_end(admin: Admin) -> None:
    stream = admin.frontend.stream(slow_request())
    await stream.next()
    await admin.stub.Drain(pb.DrainRequest(timeout_ms=60_000))
    await admin.stub.Drain(pb.DrainRequest(timeout_ms=1))
    assert (await stream.failure()).reason == "DRAINING"


async def test_a_drain_with_engines_ends_their_processes(admin: Admin) -> None:
    await admin.stub.Drain(pb.DrainRequest(timeout_ms=1000, include_engines=True))
    assert [engine.wait() for engine in admin.engines] == [0, 0]


async def test_calls_are_logged_with_caller_and_arguments(admin: Admin, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "frontend.api.admin"):
        await admin.call("IsPaused", (FIRST,))
    (message,) = [record.getMessage() for record in caplog.records if "admin call" in record.getMessage()]
    assert message.startswith("admin call IsPaused by ipv4:127.0.0.1:")
    assert f'engine_ids: "{FIRST}"' in message


async def test_weights_change_on_all_engines_and_are_not_logged(admin: Admin, caplog: pytest.LogCaptureFixture) -> None:
    await admin.results("Pause", mode=control_pb2.PAUSE_MODE_KEEP)
    started = await admin.results("StartWeightUpdate", version="step-1")
    (update_id,) = {result.update_id for result in started.values()}
    tensor = {"name": "head", "dtype": "float32", "shape": [3], "data": b"PRIVATE" + bytes(5)}
    with caplog.at_level(logging.INFO, "frontend.api.admin"):
        staged = await admin.results("UpdateWeights", update_id=update_id, tensors=[tensor])
    assert {result.tensors_received for result in staged.values()} == {1}
    (message,) = [record.getMessage() for record in caplog.records if "admin call" in record.getMessage()]
    assert "12 bytes of head" in message
    assert "PRIVATE" not in message

    failure = await failure_of(
        admin.call("UpdateWeights", update_id=update_id, tensors=[{**tensor, "data": bytes(MAX_ARGS_BYTES)}])
    )
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["args"])
    assert str(MAX_ARGS_BYTES) in failure.message
    finished = await admin.results("FinishWeightUpdate", update_id=update_id)
    assert {result.version for result in finished.values()} == {"step-1"}
    connections = admin.frontend.process.frontend.pool.connections
    # Statistics tell it, which come beside the answer and are no change of an engine's state.
    async with asyncio.timeout(WAIT_S):
        while {connection.facts.weight_version for connection in connections} != {"step-1"}:
            await admin.results("GetWeightVersion")


async def test_the_command_line_reloads_weights(admin: Admin, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    save_file(FAKE_WEIGHTS, tmp_path / "weights" / "model.safetensors")
    assert (await admin.cli("pause")).code == 0
    shown = await admin.cli("reload-weights", "--path", str(tmp_path / "weights"))
    assert (shown.code, shown.err) == (0, "")
    assert "loaded bytes" in shown.out
    versions = {result.version for result in (await admin.results("GetWeightVersion")).values()}
    assert all(version.startswith("sha256:") for version in versions)
    shown = await admin.cli("weight-version")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.out.splitlines() if line[0] == "│"]
    assert rows == [[FIRST, *versions], [SECOND, *versions]]
    for arguments in (
        ("start-weight-update", "step-2"),
        ("update-weights", "step-2", "--path", str(tmp_path / "weights")),
        ("finish-weight-update", "step-2"),
        ("reset-encoder-cache",),
    ):
        shown = await admin.cli(*arguments)
        assert (shown.code, shown.err) == (0, "")
        assert FIRST in shown.out
    assert {result.version for result in (await admin.results("GetWeightVersion")).values()} == {"step-2"}


async def test_log_levels_change_until_they_change_back(admin: Admin) -> None:
    request = pb.SetLogLevelRequest(logger="frontend.process", level="debug")
    previous = (await admin.stub.SetLogLevel(request)).previous_level
    try:
        assert logging.getLogger("frontend.process").level == logging.DEBUG
    finally:
        back = await admin.stub.SetLogLevel(pb.SetLogLevelRequest(logger="frontend.process", level=previous))
    assert back.previous_level == "DEBUG"
    for wrong in (pb.SetLogLevelRequest(level="LOUD"), pb.SetLogLevelRequest(logger="nobody", level="INFO")):
        assert (await failure_of(admin.stub.SetLogLevel(wrong))).code is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_admin_port_has_its_own_health_and_the_public_port_no_admin(admin: Admin) -> None:
    check = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    assert (await health_pb2_grpc.HealthStub(admin.channel).Check(check)).status == SERVING
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    answers = reflection_pb2_grpc.ServerReflectionStub(admin.channel).ServerReflectionInfo(asked)
    names = {service.name async for answer in answers for service in answer.list_services_response.service}
    assert SERVICE_NAME in names
    public = admin_service_pb2_grpc.AdminServiceStub(admin.frontend.channel)
    assert (await failure_of(public.IsPaused(pb.IsPausedRequest()))).code is grpc.StatusCode.UNIMPLEMENTED


async def test_the_command_line_shows_tables_and_json(admin: Admin) -> None:
    shown = await admin.cli("pause", "--mode", "keep", "--engine", FIRST)
    assert (shown.code, shown.err) == (0, "")
    shown = await admin.cli("is-paused")
    rows = [line.split("│")[1:-1] for line in shown.out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [FIRST, "true", "keep", "false"],
        [SECOND, "false", "-", "false"],
    ]
    shown = await admin.cli("is-paused", "--json")
    assert json.loads(shown.out)["results"][FIRST] == {"paused": True, "mode": "PAUSE_MODE_KEEP"}
    shown = await admin.cli("stop-profile", "--engine", SECOND)
    assert shown.code == 1
    assert f"error: engine {SECOND}: PROFILE_NOT_RUNNING" in shown.err
    shown = await admin.cli("is-paused", "--engine", "nobody")
    assert shown.code == 1
    assert "nobody" in shown.err
