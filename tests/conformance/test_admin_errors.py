"""The rows of the error table that operators see, through the admin port's socket, from Python and from Node.

What an engine refuses is an entry of the response for that engine, with the reason and the code of the table; what the
frontend refuses itself is the status of the call.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from conformance.admin_callers import CALLERS, TIMEOUT_MS, UNKNOWN, AdminCall, caller
from conformance.runners import Reply
from conformance.test_error_table import ADMIN, NOT_SEEN
from fakes.fake_executor import SLOW_TOKEN
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from frontend.engine_client import utility_calls
from running_engine import RunningEngine, running_engine
from running_frontend import SERVING, RunningFrontend, Stream, running_frontend
from stepwire.grpc_errors import REASONS
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# The second has no directory for profiles.
FIRST, SECOND = "engine-1", "engine-2"
OPERATOR, USER = "operator-0123456789abcdef", "user-0123456789abcdef"
TOKENS = f"""
[tokens.operator]
token = "{OPERATOR}"
admin = true
[tokens.user]
token = "{USER}"
"""
KEEP = ("Pause", {"mode": "PAUSE_MODE_KEEP"})
RESUME: tuple[str, dict[str, Any]] = ("Resume", {})
UPDATE = ("StartWeightUpdate", {"version": "v2"})
DISCARD = ("FinishWeightUpdate", {"update_id": "v2", "discard": True})
Step = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """What has to be called before, the call that is refused, and what makes the engine as it was."""

    reason: str
    call: Step
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()
    engine: str = FIRST
    words: str = ""


ROWS = {
    "a second pause of another kind": Row(
        "ENGINE_PAUSED", ("Pause", {"mode": "PAUSE_MODE_ABORT"}), (KEEP,), (RESUME,), words="KEEP holds"
    ),
    "resuming an engine that sleeps": Row(
        "ENGINE_SLEEPING",
        RESUME,
        (("Sleep", {"level": "SLEEP_LEVEL_OFFLOAD_WEIGHTS", "pause_mode": "PAUSE_MODE_KEEP"}),),
        (("WakeUp", {}),),
    ),
    "other weights while it runs": Row("ENGINE_NOT_PAUSED", ("ReloadWeights", {}), words="paused"),
    "a second update of the weights": Row("WEIGHT_UPDATE_OPEN", UPDATE, (KEEP, UPDATE), (DISCARD, RESUME), words="v2"),
    "an update that nobody has begun": Row("WEIGHT_UPDATE_UNKNOWN", ("UpdateWeights", {"update_id": "no"}), words="no"),
    "the end of half an update": Row(
        "WEIGHT_UPDATE_INCOMPLETE", ("FinishWeightUpdate", {"update_id": "v2"}), (KEEP, UPDATE), (DISCARD, RESUME)
    ),
    "weights that are none": Row(
        "WEIGHTS_UNUSABLE", ("ReloadWeights", {"path": "{weights}"}), (KEEP,), (RESUME,), words="can not be used"
    ),
    "a profile where profiles are off": Row(
        "PROFILING_OFF", ("StartProfile", {}), engine=SECOND, words="--profile-dir"
    ),
    "a second profile": Row("PROFILE_RUNNING", ("StartProfile", {}), (("StartProfile", {}),), (("StopProfile", {}),)),
    "the end of no profile": Row("PROFILE_NOT_RUNNING", ("StopProfile", {})),
    "a bad argument": Row("FIELD_INVALID", ("StartProfile", {"prefix": "../up"}), words="prefix"),
}
# Rows whose circumstances are more than calls.
OF_THEIR_OWN = {"PAUSE_PENDING", "UTILITY_FAILED", "ENGINE_NOT_FOUND"}


@dataclass
class World:
    """Two engines, a frontend, and the callers at its admin port."""

    frontend: RunningFrontend
    engines: list[RunningEngine]
    profiles: Path
    weights: Path
    callers: dict[str, AdminCall] = field(default_factory=dict)

    async def ask(self, name: str, step: Step, engine_id: str, **options: Any) -> Reply:
        method, args = step
        args = {key: str(self.weights) if value == "{weights}" else value for key, value in args.items()}
        request = {"engines": {"engine_ids": [engine_id]}, "args": args}
        return await asyncio.to_thread(self.callers[name], method, request, **options)

    async def do(self, name: str, steps: tuple[Step, ...], engine_id: str) -> None:
        """Calls that have to work."""
        for step in steps:
            reply = await self.ask(name, step, engine_id)
            assert list(reply.messages[0].results) == [engine_id], (reply.message, reply.messages)

    async def slow_stream(self, **options: Any) -> Stream:
        """Of one engine, and running."""
        request = GenerateRequest(token_ids=common_pb2.TokenIds(ids=[SLOW_TOKEN, 5, 6]))
        request.stop.max_tokens = 900
        request.stop.ignore_eos = True
        stream = self.frontend.stream(request, **options)
        for _ in range(2):
            await stream.next()
        return stream

    async def wait_until_pending(self, engine_id: str, **options: Any) -> None:
        """Until a pause of this engine waits for its requests."""
        while True:
            reply = await self.ask("python", ("IsPaused", {}), engine_id, **options)
            if reply.messages[0].results[engine_id].pending:
                return

    def busy_engine(self) -> int:
        """The place of the engine that has the only request."""
        connections = self.frontend.process.frontend.pool.connections
        (route,) = self.frontend.process.frontend.pool._routes.values()
        return connections.index(route.connection)


@asynccontextmanager
async def world_of(directory: Path, **settings: Any) -> AsyncIterator[World]:
    model_dir, profiles, weights = (directory / name for name in ("model", "profiles", "weights"))
    model_dir.mkdir()
    weights.mkdir()
    write_model_dir(model_dir, byte_level_backend(), config={"eos_token_id": 0})
    flags = ("--num-blocks", "64", "--max-model-len", "-1", "--trusted-dirs", str(weights))
    # A slow stream runs for 45 s.
    flags += ("--fake-slow-step-s", "0.05")
    async with AsyncExitStack() as stack:
        one = stack.enter_context(running_engine("--engine-id", FIRST, *flags, "--profile-dir", str(profiles)))
        two = stack.enter_context(running_engine("--engine-id", SECOND, *flags))
        endpoints = [f"127.0.0.1:{engine.port}" for engine in (one, two)]
        options = {"cache_dir": directory / "cache", "tokenizer": str(model_dir), **settings}
        frontend = await stack.enter_async_context(running_frontend(*endpoints, **options))
        await frontend.wait_for_health(SERVING)
        pool = frontend.process.frontend.pool
        await frontend.wait_until(lambda: all(connection.is_attached for connection in pool.connections))
        world = World(frontend, [one, two], profiles, weights)
        for name in CALLERS:
            world.callers[name] = stack.enter_context(caller(name, f"127.0.0.1:{frontend.process.admin_port}"))
        yield world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with world_of(tmp_path_factory.mktemp("admin")) as running:
        yield running


def check(reply: Reply, engine_id: str, reason: str, words: str = "") -> None:
    """The engine's own refusal, with all that the table says of its reason."""
    assert reply.code == "OK", reply.message
    (response,) = reply.messages
    assert list(response.errors) == [engine_id]
    error, (code, is_retryable) = response.errors[engine_id], REASONS[reason]
    assert (error.reason, error.grpc_code, error.retryable) == (reason, code.value[0], is_retryable), error
    assert error.message
    assert words in error.message


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("row_name", ROWS)
async def test_row(world: World, row_name: str, name: str):
    row = ROWS[row_name]
    await world.do(name, row.before, row.engine)
    reply = await world.ask(name, row.call, row.engine)
    await world.do(name, row.after, row.engine)
    check(reply, row.engine, row.reason, row.words)


@pytest.mark.parametrize("name", CALLERS)
async def test_a_pause_that_waits_runs_out_of_time_and_can_not_be_resumed(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
):
    stream = await world.slow_stream()
    busy = (FIRST, SECOND)[world.busy_engine()]
    with monkeypatch.context() as patch:
        # The engine answers after two seconds, and has the rest of the call's time for its way.
        patch.setattr(utility_calls, "ENGINE_MARGIN_S", TIMEOUT_MS / 1000 - 2)
        check(await world.ask(name, ("Pause", {"mode": "PAUSE_MODE_WAIT"}), busy), busy, "DEADLINE")
    check(await world.ask(name, RESUME, busy), busy, "PAUSE_PENDING")
    stream.call.cancel()
    while (await world.ask(name, ("IsPaused", {}), busy)).messages[0].results[busy].pending:
        pass
    await world.do(name, (RESUME,), busy)


@pytest.mark.parametrize("name", CALLERS)
async def test_an_operation_that_fails_leaves_the_engine_alive(world: World, name: str):
    await world.do(name, (("StartProfile", {}),), FIRST)
    shutil.rmtree(world.profiles)
    reply = await world.ask(name, ("StopProfile", {}), FIRST)
    check(reply, FIRST, "UTILITY_FAILED", "No such file")
    assert reply.messages[0].errors[FIRST].cause_type == "FileNotFoundError"
    await world.do(name, (("StartProfile", {}), ("StopProfile", {})), FIRST)


@pytest.mark.parametrize("name", CALLERS)
async def test_what_the_frontend_refuses_is_the_status_of_the_call(world: World, name: str):
    reply = await world.ask(name, RESUME, "nobody")
    assert (reply.code, reply.reason) == ("NOT_FOUND", "ENGINE_NOT_FOUND")
    assert reply.error_metadata["retryable"] == "false"
    assert "nobody" in reply.message
    reply = await asyncio.to_thread(world.callers[name], "SetLogLevel", {"level": "LOUD"})
    assert (reply.code, reply.reason, reply.fields) == ("INVALID_ARGUMENT", "FIELD_INVALID", ["level"])


@pytest.mark.parametrize("name", CALLERS)
async def test_an_operation_that_the_server_does_not_know_is_unimplemented(world: World, name: str):
    reply = await asyncio.to_thread(world.callers[name], UNKNOWN, {})
    assert (reply.code, reply.messages) == ("UNIMPLEMENTED", [])
    await world.do(name, (("IsPaused", {}),), FIRST)


@pytest.mark.parametrize("name", CALLERS)
async def test_calls_of_an_engine_that_drains_or_dies_are_unavailable(name: str, tmp_path: Path):
    (tmp_path / "tokens.toml").write_text(TOKENS)
    async with world_of(tmp_path, token_file=tmp_path / "tokens.toml") as world:
        for token, code in (("", "UNAUTHENTICATED"), (USER, "PERMISSION_DENIED")):
            reply = await world.ask(name, RESUME, FIRST, token=token)
            assert (reply.code, reply.reason) == (code, code)
        stream = await world.slow_stream(metadata=(("authorization", f"Bearer {USER}"),))
        place = world.busy_engine()
        busy = (FIRST, SECOND)[place]
        waiting = world.ask(name, ("Pause", {"mode": "PAUSE_MODE_WAIT"}), busy, token=OPERATOR)
        pause = asyncio.ensure_future(waiting)
        world.engines[place].terminate()
        check(await pause, busy, "DRAINING")
        check(await world.ask(name, ("StartProfile", {}), busy, token=OPERATOR), busy, "DRAINING")
        other = (FIRST, SECOND)[1 - place]
        lost = await world.slow_stream(metadata=(("authorization", f"Bearer {USER}"),))
        pause = asyncio.ensure_future(world.ask(name, ("Pause", {"mode": "PAUSE_MODE_WAIT"}), other, token=OPERATOR))
        await world.wait_until_pending(other, token=OPERATOR)
        world.engines[1 - place].process.kill()
        check(await pause, other, "ENGINE_DEAD")
        pool = world.frontend.process.frontend.pool
        await world.frontend.wait_until(lambda: not pool.connections[1 - place].is_attached)
        reply = await world.ask(name, RESUME, other, token=OPERATOR)
        assert (reply.code, reply.reason) == ("NOT_FOUND", "ENGINE_NOT_FOUND")
        stream.call.cancel()
        assert (await lost.failure()).reason == "ENGINE_DEAD"


async def test_every_reason_for_operators_has_a_row():
    rows = {row.reason for row in ROWS.values()} | OF_THEIR_OWN
    assert {reason for reason, why in NOT_SEEN.items() if why == ADMIN} <= rows
