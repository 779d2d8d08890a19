"""What the caller sees when a process dies or is told to end: real processes, real model, real signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fakes.faulty_engine_process import MARKED_PROMPT
from kept_engines import Engines
from running_stack import NOT_SERVING, SERVING, Frontend, Stack, running_stack, wait_until_zero
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
# Less than a frontend waits for a pong.
DEATH_IS_KNOWN_WITHIN_S = 10.0
# How long the engine keeps the requests of a frontend that is gone.
SESSION_GRACE_S = 5.0


@pytest.fixture(scope="module")
def engines(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("engines")) as stack:
        yield Engines(stack)


@pytest.fixture
def stack(embedded_model_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    with running_stack(embedded_model_dir, tmp_path) as stack:
        yield stack


def long_request(max_tokens: int = 4000) -> GenerateRequest:
    return GenerateRequest(
        text="Once upon a time",
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    )


def started(frontend: Frontend, max_tokens: int = 4000) -> grpc.Call:
    """A stream that has delivered text."""
    call = frontend.generation.GenerateStream(long_request(max_tokens), timeout=TIMEOUT_S)
    while not next(call).delta.text:
        pass
    return call


def failure_of(call: grpc.Call) -> tuple[grpc.StatusCode, error_details_pb2.ErrorInfo]:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)  # type: ignore[call-overload]
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert any(detail.Unpack(info) for detail in status.details)
    return caught.value.code(), info


def test_a_killed_engine_fails_every_stream_at_once_and_the_frontend_comes_back_with_it(
    stack: Stack, engines: Engines
) -> None:
    engine = engines.take()
    frontend = stack.frontend(engine)
    frontend.wait_for_health(SERVING)
    calls = [started(frontend) for _ in range(4)]
    engine.process.kill()
    killed = time.monotonic()
    for call in calls:
        code, info = failure_of(call)
        assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
        assert info.metadata["kind"] == "transport"
        assert int(info.metadata["tokens_emitted"]) > 0
    assert time.monotonic() - killed < DEATH_IS_KNOWN_WITHIN_S
    frontend.wait_for_health(NOT_SERVING)
    code, info = failure_of(frontend.generation.GenerateStream(long_request(), timeout=TIMEOUT_S))
    assert (code, info.metadata["tokens_emitted"]) == (grpc.StatusCode.UNAVAILABLE, "0")
    engines.start(engine.port)
    frontend.wait_for_health(SERVING)
    answer = frontend.generation.Generate(long_request(4), timeout=TIMEOUT_S)
    assert answer.usage.completion_tokens == 4


@pytest.mark.regression(25)
@pytest.mark.regression("forward error fails all pending requests")
def test_an_exception_in_the_executor_reaches_every_caller_with_its_cause(stack: Stack) -> None:
    engine = stack.engine(package="fakes.faulty_engine_process")
    frontend = stack.frontend(engine)
    frontend.wait_for_health(SERVING)
    call = started(frontend)
    marked = GenerateRequest(token_ids=common_pb2.TokenIds(ids=MARKED_PROMPT))
    for failed in (frontend.generation.GenerateStream(marked, timeout=TIMEOUT_S), call):
        code, info = failure_of(failed)
        assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
        assert info.metadata["cause"] == "STEP_FAILED"
        assert info.metadata["cause_type"] == "RuntimeError"
    frontend.wait_for_health(NOT_SERVING)
    assert engine.wait() == 1


@pytest.mark.regression(1)
def test_a_killed_frontend_leaves_no_block_behind_and_the_next_one_is_served(stack: Stack, engines: Engines) -> None:
    engine = engines.take()
    first = stack.frontend(engine)
    first.wait_for_health(SERVING)
    # Kept: a call that nobody holds is cancelled, and the engine would hear of that.
    call = started(first)
    first.kill()
    second = stack.frontend(engine)
    second.wait_for_health(SERVING)
    wait_until_zero(engine, "stepwire_engine_core_kv_cache_usage_ratio", SESSION_GRACE_S + 30)
    assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert second.generation.Generate(long_request(4), timeout=TIMEOUT_S).usage.completion_tokens == 4


def test_sigterm_of_the_frontend_completes_what_runs(stack: Stack, engines: Engines) -> None:
    engine = engines.take()
    frontend = stack.frontend(engine)
    frontend.wait_for_health(SERVING)
    call = started(frontend, max_tokens=40)
    frontend.signal(signal.SIGTERM)
    assert list(call)[-1].finished.usage.completion_tokens == 40  # type: ignore[call-overload]
    assert frontend.wait() == 0
    wait_until_zero(engine, "stepwire_engine_core_requests_running")


def test_sigterm_of_the_engine_completes_what_runs_and_refuses_the_rest(stack: Stack, engines: Engines) -> None:
    engine = engines.take()
    frontend = stack.frontend(engine)
    frontend.wait_for_health(SERVING)
    # The engine can not end before this one is left.
    held = started(frontend)
    call = started(frontend, max_tokens=40)
    engine.signal(signal.SIGTERM)
    frontend.wait_for_health(NOT_SERVING)
    code, info = failure_of(frontend.generation.GenerateStream(long_request(), timeout=TIMEOUT_S))
    assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    held.cancel()
    assert list(call)[-1].finished.usage.completion_tokens == 40  # type: ignore[call-overload]
    assert engine.wait() == 0


def test_an_engine_without_drain_time_says_so_to_its_callers(stack: Stack) -> None:
    engine = stack.engine("--drain-timeout-s", "0")
    frontend = stack.frontend(engine)
    frontend.wait_for_health(SERVING)
    call = started(frontend)
    engine.signal(signal.SIGTERM)
    code, info = failure_of(call)
    assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert int(info.metadata["tokens_emitted"]) > 0
    assert engine.wait() == 0
