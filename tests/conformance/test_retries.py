"""The shared service config by its effect: what each client's gRPC repeats by itself, how often, and when."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from conformance import runners
from conformance.runners import Runner

pytestmark = pytest.mark.slow

REPEATED = ["GenerationService/Generate", "ModelService/ListModels", "TokenizationService/Tokenize"]
NOT_REPEATED = ["GenerationService/GenerateStream", "ChatService/Chat", "ChatService/ChatStream"]
PUSHBACK_MS = 700


class FlakyServer(grpc.GenericRpcHandler):
    """Answers every method with an empty message, after UNAVAILABLE so often as it is told."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.pushback_ms: int | None = None
        self.calls: Counter[str] = Counter()
        self.times: list[float] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = details.method.removeprefix("/stepwire.v1.")

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.times.append(time.monotonic())
            self.calls[method] += 1
            if self.calls[method] <= self.num_failures:
                if self.pushback_ms is not None:
                    context.set_trailing_metadata((("grpc-retry-pushback-ms", str(self.pushback_ms)),))
                context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            return b""

        if not method.endswith("Stream"):
            return grpc.unary_unary_rpc_method_handler(answer)
        return grpc.unary_stream_rpc_method_handler(lambda request, context: iter([answer(request, context)]))


@pytest.fixture
def server() -> Iterator[FlakyServer]:
    flaky = FlakyServer()
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[flaky])
    flaky.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield flaky
    server.stop(None).wait()


@pytest.fixture(params=runners.RUNNERS)
def runner(request: pytest.FixtureRequest, server: FlakyServer) -> Iterator[Runner]:
    # One each: the throttle counts what fails on a channel.
    with runners.start(request.param, server.target) as runner:
        yield runner


def test_a_refusal_is_retried_and_the_call_succeeds(runner: Runner, server: FlakyServer) -> None:
    server.num_failures = 1
    for method in REPEATED:
        assert runner.call(method, {}).code == "OK"
    assert server.calls == dict.fromkeys(REPEATED, 2)


def test_no_stream_and_no_chat_is_repeated(runner: Runner, server: FlakyServer) -> None:
    server.num_failures = 1
    for method in NOT_REPEATED:
        assert runner.call(method, {}).code == "UNAVAILABLE"
    assert server.calls == dict.fromkeys(NOT_REPEATED, 1)


def test_the_server_says_when(runner: Runner, server: FlakyServer) -> None:
    server.num_failures, server.pushback_ms = 1, PUSHBACK_MS
    assert runner.call(REPEATED[0], {}).code == "OK"
    first, second = server.times
    # By itself a client would come again after 100 ms.
    assert second - first >= PUSHBACK_MS / 1000


def test_the_server_may_forbid_it(runner: Runner, server: FlakyServer) -> None:
    server.num_failures, server.pushback_ms = 1, -1
    assert runner.call(REPEATED[0], {}).code == "UNAVAILABLE"
    assert server.calls == {REPEATED[0]: 1}


def test_four_attempts_are_all_and_a_channel_that_only_fails_is_not_retried_on(
    runner: Runner, server: FlakyServer
) -> None:
    server.num_failures = 1000
    assert runner.call(REPEATED[0], {}).code == "UNAVAILABLE"
    assert server.calls == {REPEATED[0]: 4}
    assert runner.call(REPEATED[0], {}).code == "UNAVAILABLE"
    assert server.calls == {REPEATED[0]: 5}
