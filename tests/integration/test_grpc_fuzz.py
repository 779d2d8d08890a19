"""Hostile messages to every method of the public port: each is answered, none as a failure of ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import grpc
import hypothesis
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.hostile_messages import empty_message, wire_bytes
from fuzzed_processes import FuzzedProcesses, fuzzed_processes
from fuzzing import Fuzzing
from stepwire.v1 import (
    chat_service_pb2,
    common_pb2,
    generation_service_pb2,
    model_service_pb2,
    tokenization_service_pb2,
)

pytestmark = [pytest.mark.slow, pytest.mark.fuzz]

NUM_EXAMPLES = 600
TIMEOUT_S = 10.0
_SERVICES = (generation_service_pb2, chat_service_pb2, tokenization_service_pb2, model_service_pb2)
_OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE}
_FEW = common_pb2.StopConditions(max_tokens=4)
_HELLO = chat_service_pb2.Message(role=chat_service_pb2.ROLE_USER, content=[chat_service_pb2.ContentPart(text="hello")])
_TOOL = chat_service_pb2.Tool(name="add", parameters_json='{"type": "object", "properties": {"a": {}}}')
_CHAT = chat_service_pb2.ChatRequest(messages=[_HELLO], tools=[_TOOL], stop=_FEW)
_GOOD: dict[str, Message] = {
    "GenerateRequest": generation_service_pb2.GenerateRequest(text="hello", stop=_FEW),
    "ChatRequest": _CHAT,
    "RenderChatRequest": tokenization_service_pb2.RenderChatRequest(chat=_CHAT),
    "TokenizeRequest": tokenization_service_pb2.TokenizeRequest(texts=["hello"]),
    "DetokenizeRequest": tokenization_service_pb2.DetokenizeRequest(sequences=[common_pb2.TokenIds(ids=[5, 6])]),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedProcesses]:
    with fuzzed_processes(tmp_path_factory.mktemp("fuzz")) as processes:
        yield processes


def methods() -> list[MethodDescriptor]:
    services = [service for module in _SERVICES for service in module.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


def good_message(method: MethodDescriptor) -> Message:
    return _GOOD.get(method.input_type.name) or empty_message(method.input_type)


def caller(channel: grpc.Channel, method: MethodDescriptor) -> Callable[[bytes], object]:
    """Sends bytes and reads everything that comes; nothing is parsed on the way."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.server_streaming:
        stream = channel.unary_stream(path)
        return lambda data: list(stream(data, timeout=TIMEOUT_S))
    unary = channel.unary_unary(path)
    return lambda data: unary(data, timeout=TIMEOUT_S)


def send(call: Callable[[bytes], object], data: bytes) -> None:
    """Raises AssertionError for an end that is a failure of ours, or for none."""
    started = time.monotonic()
    try:
        call(data)
        return
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
    assert code not in _OURS, (code, details, data[:2000])
    # A time limit of the request may be over, but not ours.
    assert time.monotonic() - started < TIMEOUT_S, (code, data[:2000])


def test_any_message_to_any_method_is_answered_or_refused(target: FuzzedProcesses, fuzzing: Fuzzing) -> None:
    calls = {method.full_name: caller(target.frontend.channel, method) for method in methods()}
    requests = st.one_of(
        *(st.tuples(st.just(method.full_name), wire_bytes(good_message(method))) for method in methods())
    )

    @given(requests)
    @settings(
        max_examples=NUM_EXAMPLES, derandomize=False, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    def check(given_request: tuple[str, bytes]) -> None:
        name, data = given_request
        send(calls[name], data)

    for seed in fuzzing.seeds():
        hypothesis.seed(seed)(check)()
        target.check_unharmed()
