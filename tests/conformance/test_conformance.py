"""Every scenario of scenarios.yaml with every client, against both real processes and the real model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from conformance import checks, runners, scenarios
from conformance.runners import Reply, Runner
from conformance.scenarios import Scenario, Step
from running_stack import SERVING, Frontend, Service, running_stack, wait_until_zero
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

SCENARIOS = scenarios.load()


class World:
    """One engine, one frontend, and the runners that the tests have asked for so far."""

    def __init__(self, engine: Service, frontend: Frontend, exit_stack: ExitStack) -> None:
        self.engine = engine
        self.frontend = frontend
        self._exit_stack = exit_stack
        self._runners: dict[str, Runner] = {}

    def runner(self, name: str) -> Runner:
        if name not in self._runners:
            runner = runners.start(name, f"127.0.0.1:{self.frontend.port}")
            self._runners[name] = self._exit_stack.enter_context(runner)
        return self._runners[name]

    def wait_until_nothing_is_left(self) -> None:
        """No KV block in use and no request anywhere."""
        for name in ("kv_cache_usage_ratio", "requests_running", "requests_waiting"):
            wait_until_zero(self.engine, f"stepwire_engine_core_{name}")
        wait_until_zero(self.frontend, "stepwire_frontend_requests_in_flight")


@pytest.fixture(scope="module")
def world(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with (
        running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack,
        ExitStack() as exit_stack,
    ):
        engine = stack.engine()
        frontend = stack.frontend(engine)
        frontend.wait_for_health(SERVING)
        yield World(engine, frontend, exit_stack)


@pytest.mark.parametrize("runner_name", runners.RUNNERS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_scenario(world: World, scenario: Scenario, runner_name: str) -> None:
    runner, saved, held = world.runner(runner_name), {}, []
    try:
        for step in scenario.steps:
            if step.held:
                held.append(hold(world.frontend, step))
                continue
            request = continued(step, saved) if step.continues else step.request
            reply = runner.call(step.method, request, **step.options)
            checks.check(reply, step.expect, saved)
            saved[step.save] = reply
    finally:
        for call in held:
            call.cancel()
    world.wait_until_nothing_is_left()


def hold(frontend: Frontend, step: Step) -> Any:
    """A stream that has been accepted and is not read on."""
    call = frontend.generation.GenerateStream(ParseDict(step.request, GenerateRequest()))
    assert next(call).HasField("accepted")
    return call


def continued(step: Step, saved: dict[str, Reply]) -> dict[str, Any]:
    """The request of a client that goes on where a stream has ended: its tokens so far, and its seed."""
    start = saved[step.continues]
    request = copy.deepcopy(dict(step.request))
    request["resume_output_token_ids"] = {"ids": checks.token_ids_of(start)}
    request.setdefault("sampling", {})["seed"] = str(start.messages[0].accepted.seed)
    return request
