"""Engines behind a DNS name: they come, leave and come back while requests run."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fakes.fake_engine import FakeEngine
from frontend.engine_client import discovery
from running_frontend import NOT_SERVING, SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire.v1 import model_service_pb2

NAME = "dns:///engines:50061"


class Dns:
    """What the name stands for."""

    def __init__(self) -> None:
        self.addresses: list[str] | None = []
        self.num_asked = 0

    async def resolve(self, name: str) -> list[str]:
        self.num_asked += 1
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self.addresses


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Dns:
    dns = Dns()
    monkeypatch.setattr(discovery, "resolve_addresses", dns.resolve)
    monkeypatch.setattr(discovery, "POLL_S", 0.01)
    return dns


@pytest.fixture
async def second(tokenizer_dir: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(tokenizer_dir, engine_id="fake-1", vocab_size=400, max_model_len=100).running() as fake:
        yield fake


@pytest.fixture
async def running(dns: Dns, engine: FakeEngine, tmp_path: Path) -> AsyncIterator[RunningFrontend]:
    """Attached to the first engine."""
    dns.addresses = [engine.endpoint]
    async with running_frontend(NAME, cache_dir=tmp_path / "cache") as running:
        await running.wait_for_health(SERVING)
        yield running


def attached(running: RunningFrontend) -> set[str]:
    """Engines that get requests."""
    return {one.engine_id for one in running.process.frontend.pool.connections if one.is_available}


async def max_model_len(running: RunningFrontend) -> int:
    return (await running.models.GetModel(model_service_pb2.GetModelRequest())).model.max_model_len


async def test_a_new_address_is_attached_and_one_that_leaves_ends_its_requests_first(
    running: RunningFrontend, dns: Dns, engine: FakeEngine, second: FakeEngine
):
    engine.may_step.clear()
    stream = running.stream(request(max_tokens=3))
    await stream.next()
    dns.addresses = [engine.endpoint, second.endpoint]
    await running.wait_until(lambda: attached(running) == {"fake-0", "fake-1"})
    assert await max_model_len(running) == 100

    dns.addresses = [second.endpoint]
    await running.wait_until(lambda: attached(running) == {"fake-1"})
    for _ in range(4):
        assert (await running.stream(request()).next()).accepted.engine_id == "fake-1"
    assert (len(engine.adds), engine.goodbyes) == (1, [])
    engine.may_step.set()
    assert (await stream.rest())[-1].HasField("finished")
    await engine.wait_until(lambda: not engine.sessions)

    assert [goodbye.abort_running for goodbye in engine.goodbyes] == [False]
    assert [one.engine_id for one in running.process.frontend.pool.connections] == ["fake-1"]
    registry = running.process.metrics.registry
    assert registry.get_sample_value("stepwire_frontend_engine_up", {"engine_id": "fake-0"}) is None
    assert running.metric("engine_up", engine_id="fake-1") == 1
    assert running.metric("engine_deaths_total", engine_id="fake-0", kind="transport", cause="") == 0


async def test_the_limits_of_an_engine_go_with_it(
    running: RunningFrontend, dns: Dns, engine: FakeEngine, second: FakeEngine
):
    dns.addresses = [engine.endpoint, second.endpoint]
    await running.wait_until(lambda: attached(running) == {"fake-0", "fake-1"})
    assert await max_model_len(running) == 100
    dns.addresses = [engine.endpoint]
    await second.wait_until(lambda: second.goodbyes != [])
    assert await max_model_len(running) == engine.ready.max_model_len


async def test_an_address_that_comes_back_while_it_drains_is_used_again(
    running: RunningFrontend, dns: Dns, engine: FakeEngine, second: FakeEngine
):
    engine.may_step.clear()
    stream = running.stream(request(max_tokens=3))
    await stream.next()
    dns.addresses = [second.endpoint]
    await running.wait_until(lambda: attached(running) == {"fake-1"})
    dns.addresses = [engine.endpoint, second.endpoint]
    await running.wait_until(lambda: attached(running) == {"fake-0", "fake-1"})
    engine.may_step.set()
    assert (await stream.rest())[-1].HasField("finished")
    assert {(await running.stream(request()).next()).accepted.engine_id for _ in range(4)} == {"fake-0", "fake-1"}
    assert (len(engine.hellos), engine.goodbyes) == (1, [])


async def test_an_address_that_left_for_good_is_attached_anew_when_it_comes_back(
    running: RunningFrontend, dns: Dns, engine: FakeEngine, second: FakeEngine
):
    dns.addresses = [second.endpoint]
    await engine.wait_until(lambda: engine.goodbyes != [])
    dns.addresses = [engine.endpoint, second.endpoint]
    await running.wait_until(lambda: attached(running) == {"fake-0", "fake-1"})
    assert {(await running.stream(request()).next()).accepted.engine_id for _ in range(4)} == {"fake-0", "fake-1"}


async def test_a_name_that_stands_for_nothing_any_more_costs_no_engine(
    running: RunningFrontend, dns: Dns, engine: FakeEngine
):
    dns.addresses = None
    asked = dns.num_asked
    while dns.num_asked < asked + 3:
        await running.generation.Generate(request())
    assert attached(running) == {"fake-0"}


async def test_without_any_address_the_caller_is_told_what_is_missing(dns: Dns, engine: FakeEngine, tmp_path: Path):
    async with running_frontend(NAME, cache_dir=tmp_path) as running:
        await running.wait_for_health(NOT_SERVING)
        failure = await failure_of(running.generation.Generate(request()))
        assert failure.reason == "ENGINE_STARTING"
        assert "--engine-endpoints" in failure.message
        dns.addresses = [engine.endpoint]
        await running.wait_for_health(SERVING)
