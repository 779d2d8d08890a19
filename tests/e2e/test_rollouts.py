"""Every process is restarted in turn under a steady load, and no caller sees it. Only the model is a fake.

The clients are two addresses wide and resume what broke, as a roll-out in a cluster has it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.fake_executor import SLOW_TOKEN
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from free_ports import free_port
from rollout_load import Answer, Load, differences
from running_stack import SERVING, Frontend, Service, Stack, running_stack, wait_for_metric, wait_until_zero
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest
from stepwire_client import AsyncClient

pytestmark = pytest.mark.slow

NUM_STREAMS = 200
TIMEOUT_S = 60.0
# What is left of an engine's streams then goes on at the other engine; a frontend lets all of its own end.
ENGINE_DRAIN_S = 0.1
FRONTEND_DRAIN_S = 10.0
PRE_STOP_DELAY_S = 0.5
# As the manifests have it.
GRACE_BEHIND_DRAIN_S = 10.0


class Fleet:
    """Two frontends before two engines; one that is started again has its old address."""

    def __init__(self, stack: Stack, tokenizer_dir: Path) -> None:
        self._stack = stack
        drains = ("--pre-stop-delay-s", str(PRE_STOP_DELAY_S), "--drain-timeout-s", str(FRONTEND_DRAIN_S))
        self._frontend_flags = ("--tokenizer", str(tokenizer_dir), *drains)
        self._ports = [free_port() for _ in range(4)]
        self.engines = [self._start_engine(number) for number in range(2)]
        self.frontends = [self._start_frontend(number) for number in range(2)]
        self._wait_until_whole()

    @property
    def target(self) -> str:
        return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in self._ports[2:])

    def restart(self, service: Service, how: signal.Signals) -> int:
        """End it, start it again, wait until everybody knows; returns the exit code."""
        started = time.monotonic()
        service.signal(how)
        code = service.wait()
        drain_s = PRE_STOP_DELAY_S + FRONTEND_DRAIN_S if isinstance(service, Frontend) else ENGINE_DRAIN_S
        assert time.monotonic() - started < drain_s + GRACE_BEHIND_DRAIN_S
        if isinstance(service, Frontend):
            number = self.frontends.index(service)
            self.frontends[number] = self._start_frontend(number)
        else:
            number = self.engines.index(service)
            self.engines[number] = self._start_engine(number)
        self._wait_until_whole()
        return code

    def _start_engine(self, number: int) -> Service:
        flags = ("--engine-id", f"engine-{number}", "--drain-timeout-s", str(ENGINE_DRAIN_S))
        return self._stack.engine(*flags, port=self._ports[number], package="fakes.fake_engine_process")

    def _start_frontend(self, number: int) -> Frontend:
        return self._stack.frontend(*self.engines, port=self._ports[2 + number], flags=self._frontend_flags)

    def _wait_until_whole(self) -> None:
        for frontend in self.frontends:
            frontend.wait_for_health(SERVING)
            wait_for_metric(frontend, "stepwire_frontend_engine_up", len(self.engines), TIMEOUT_S)


def request_of(number: int) -> GenerateRequest:
    """Short ones and long ones, the longest of which outlive the drain of their engine."""
    request = GenerateRequest(token_ids=common_pb2.TokenIds(ids=[SLOW_TOKEN, 3 + number]))
    request.stop.max_tokens, request.stop.ignore_eos = 20 + 20 * (number % 5), True
    request.sampling.temperature = 0
    return request


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    (tmp_path / "model").mkdir()
    tokenizer_dir = write_model_dir(tmp_path / "model", byte_level_backend(), config={"eos_token_id": 0})
    with running_stack(tokenizer_dir, tmp_path / "cache") as stack:
        yield Fleet(stack, tokenizer_dir)


async def disturbed_run(fleet: Fleet, how: signal.Signals, exit_code: int) -> list[Answer]:
    """The answers of a load during which each process was ended so and started again."""
    async with AsyncClient(fleet.target, is_balanced=True) as client:
        # Three in four have more to go than an engine's drain lasts: of so many one has, whenever it begins.
        load = Load(client, request_of, NUM_STREAMS, concurrency=12)
        for service in (*fleet.frontends, *fleet.engines):
            assert await asyncio.to_thread(fleet.restart, service, how) == exit_code
        return await load.stop()


async def test_a_roll_out_of_every_process_fails_no_call_and_changes_no_token(fleet: Fleet) -> None:
    async with AsyncClient(fleet.target, is_balanced=True) as client:
        undisturbed = await Load(client, request_of, NUM_STREAMS, concurrency=64).stop()
    assert {len(answer.token_ids) for answer in undisturbed} == {20, 40, 60, 80, 100}

    told = await disturbed_run(fleet, signal.SIGTERM, 0)
    assert differences(told, undisturbed) == []
    assert len(told) >= NUM_STREAMS
    assert sum(answer.num_resumes for answer in told), "no stream outlived the drain of its engine"

    killed = await disturbed_run(fleet, signal.SIGKILL, -signal.SIGKILL)
    assert differences(killed, undisturbed) == []
    assert len(killed) >= NUM_STREAMS
    assert sum(answer.num_resumes for answer in killed), "no stream ran where a process was killed"
    for engine in fleet.engines:
        wait_until_zero(engine, "stepwire_engine_core_kv_cache_usage_ratio")
