"""A service whose model is shared by two workers: deaths of either side, as clients and operators see them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fakes.tiny_models import save_shardable_model
from kept_engines import Engines
from running_stack import SERVING, Frontend, Service, Stack, running_stack
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
# Less than a frontend waits for a pong.
DEATH_IS_KNOWN_WITHIN_S = 10.0
FLAGS = ("--tensor-parallel-size", "2", "--max-model-len", "4096", "--kv-cache-memory", "64MiB")


@pytest.fixture(scope="module")
def model_dir(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_shardable_model(tmp_path_factory.mktemp("shardable") / "model", embedded_model_dir)


@pytest.fixture(scope="module")
def engines(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with running_stack(model_dir, tmp_path_factory.mktemp("engines")) as stack:
        yield Engines(stack, *FLAGS)


@pytest.fixture
def stack(model_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    with running_stack(model_dir, tmp_path / "cache") as stack:
        yield stack


def request(max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        text="Once upon a time",
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


def started(frontend: Frontend, max_tokens: int = 4000) -> grpc.Call:
    """A stream that has delivered tokens."""
    call = frontend.generation.GenerateStream(request(max_tokens), timeout=TIMEOUT_S)
    while not next(call).HasField("delta"):
        pass
    return call


def workers_of(engine: Service) -> list[psutil.Process]:
    workers = [
        child for child in psutil.Process(engine.process.pid).children() if "parallel.worker" in child.cmdline()[2]
    ]
    assert len(workers) == 2
    return workers


def assert_all_end(workers: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(workers, timeout=TIMEOUT_S)
    for worker in alive:
        # It holds the pipe that the engine's log is read from: what waits for the engine would hang.
        worker.kill()
    assert alive == []


@pytest.mark.regression(25)
def test_a_killed_worker_is_told_to_every_client_and_a_restart_serves(stack: Stack, engines: Engines) -> None:
    engine = engines.take()
    frontend = stack.frontend(engine)
    frontend.wait_for_health(SERVING)
    workers = workers_of(engine)
    calls = [started(frontend) for _ in range(2)]
    workers[1].kill()
    killed = time.monotonic()
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)  # type: ignore[call-overload]
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        info = error_details_pb2.ErrorInfo()
        status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
        assert any(detail.Unpack(info) for detail in status.details)
        assert (info.reason, info.metadata["cause"]) == ("ENGINE_DEAD", "EXECUTOR_FAILED")
    assert time.monotonic() - killed < DEATH_IS_KNOWN_WITHIN_S
    assert engine.wait() == 1
    assert_all_end(workers)
    engines.start(engine.port)
    frontend.wait_for_health(SERVING)
    assert frontend.generation.Generate(request(4), timeout=TIMEOUT_S).usage.completion_tokens == 4


def test_a_killed_engine_takes_its_workers_along(stack: Stack, engines: Engines) -> None:
    engine = engines.take()
    frontend = stack.frontend(engine)
    frontend.wait_for_health(SERVING)
    workers = workers_of(engine)
    started(frontend)
    # One that can notice nothing by itself.
    workers[1].suspend()
    engine.signal(signal.SIGKILL)
    assert_all_end(workers)


def test_a_step_that_hangs_in_a_worker_ends_the_engine_and_all_workers(stack: Stack) -> None:
    engine = stack.engine(*FLAGS, "--stall-warn-s", "2", "--step-timeout-s", "4")
    frontend = stack.frontend(engine)
    frontend.wait_for_health(SERVING)
    workers = workers_of(engine)
    call = started(frontend)
    workers[1].suspend()
    with pytest.raises(grpc.RpcError):
        list(call)  # type: ignore[call-overload]
    assert_all_end(workers)
    assert engine.wait() == 1


def test_sigterm_of_all_processes_completes_what_runs(stack: Stack, engines: Engines) -> None:
    engine = engines.take()
    frontend = stack.frontend(engine)
    frontend.wait_for_health(SERVING)
    workers = workers_of(engine)
    call = started(frontend, max_tokens=40)
    for process in workers:
        process.send_signal(signal.SIGTERM)
    engine.signal(signal.SIGTERM)
    assert list(call)[-1].finished.usage.completion_tokens == 40  # type: ignore[call-overload]
    assert engine.wait() == 0
    assert_all_end(workers)


def test_a_size_that_does_not_fit_the_model_is_one_sentence_for_the_operator(stack: Stack) -> None:
    engine = stack.engine("--tensor-parallel-size", "4")
    assert engine.wait() == 1
    [line] = [line for line in engine.log if "can not start" in line]
    assert "--tensor-parallel-size 4 does not divide what model" in line
    assert not any("Traceback" in line for line in engine.log)
