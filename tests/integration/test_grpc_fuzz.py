"""Hostile messages to every method of both ports: each is answered, none as a failure of ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import grpc
import hypothesis
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2

from fakes.hostile_messages import empty_message, wire_bytes
from fuzzed_processes import FuzzedProcesses, fuzzed_processes
from fuzzing import Fuzzing
from stepwire.v1 import (
    admin_service_pb2,
    chat_service_pb2,
    common_pb2,
    embedding_service_pb2,
    generation_service_pb2,
    model_service_pb2,
    tokenization_service_pb2,
)

pytestmark = [pytest.mark.slow, pytest.mark.fuzz]

TIMEOUT_S = 30.0
_SERVICES = (
    generation_service_pb2,
    chat_service_pb2,
    embedding_service_pb2,
    tokenization_service_pb2,
    model_service_pb2,
)
_OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE}
_FEW = common_pb2.StopConditions(max_tokens=4)
_HELLO = chat_service_pb2.Message(role=chat_service_pb2.ROLE_USER, content=[chat_service_pb2.ContentPart(text="hello")])
_TOOL = chat_service_pb2.Tool(name="add", parameters_json='{"type": "object", "properties": {"a": {}}}')
_CHAT = chat_service_pb2.ChatRequest(messages=[_HELLO], tools=[_TOOL], stop=_FEW)
_GOOD: dict[str, Message] = {
    message.DESCRIPTOR.full_name: message
    for message in (
        generation_service_pb2.GenerateRequest(text="hello", stop=_FEW),
        _CHAT,
        embedding_service_pb2.EmbedRequest(inputs=[embedding_service_pb2.EmbedRequest.Input(text="hello")]),
        tokenization_service_pb2.RenderChatRequest(chat=_CHAT),
        tokenization_service_pb2.TokenizeRequest(texts=["hello"]),
        tokenization_service_pb2.DetokenizeRequest(sequences=[common_pb2.TokenIds(ids=[5, 6])]),
    )
}
_KEYS = (
    "authorization",
    "x-request-id",
    "x-data-parallel-rank",
    "x-gateway-inference-fairness-id",
    "x-gateway-inference-objective",
    "traceparent",
)
_VALUES = ("", "0", "-1", "7", "1e9", "9" * 400, "Bearer ", "Bearer a b", "a" * 300, "%s{0}", "<x>; y=z", "00-0-0-00")
Metadata = list[tuple[str, str]]
metadata = st.lists(st.tuples(st.sampled_from(_KEYS), st.sampled_from(_VALUES)), max_size=2)
# These stop the service, hold it up, or hide what it logs: an operator means them.
_MEANT = {"Drain", "Pause", "Sleep", "SetLogLevel"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedProcesses]:
    with fuzzed_processes(tmp_path_factory.mktemp("fuzz")) as processes:
        yield processes


def methods_of(*services: ServiceDescriptor) -> list[MethodDescriptor]:
    return [method for service in services for method in service.methods if method.name not in _MEANT]


def good_message(method: MethodDescriptor) -> Message:
    return _GOOD.get(method.input_type.full_name) or empty_message(method.input_type)


def caller(channel: grpc.Channel, method: MethodDescriptor) -> Callable[[bytes, Metadata], object]:
    """Sends bytes and reads everything that comes; nothing is parsed on the way."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.server_streaming:
        stream = channel.unary_stream(path)
        return lambda data, metadata: list(stream(data, timeout=TIMEOUT_S, metadata=metadata))
    unary = channel.unary_unary(path)
    return lambda data, metadata: unary(data, timeout=TIMEOUT_S, metadata=metadata)


def send(call: Callable[[bytes, Metadata], object], data: bytes, metadata: Metadata) -> None:
    """Raises AssertionError for an end that is a failure of ours, or for none."""
    started = time.monotonic()
    try:
        call(data, metadata)
        return
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
    assert code not in _OURS, (code, details, data[:2000], metadata)
    # A time limit of the request may be over, but not ours.
    assert time.monotonic() - started < TIMEOUT_S, (code, data[:2000], metadata)


def fuzz(
    target: FuzzedProcesses, fuzzing: Fuzzing, channel: grpc.Channel, methods: list[MethodDescriptor], num_examples: int
) -> None:
    calls = {method.full_name: caller(channel, method) for method in methods}
    for method in methods:
        if method.input_type.full_name in _GOOD:
            # What most hostile ones begin with is answered.
            calls[method.full_name](good_message(method).SerializeToString(), [])
    requests = st.one_of(
        *(st.tuples(st.just(one.full_name), wire_bytes(good_message(one)), metadata) for one in methods)
    )

    @given(requests)
    @settings(
        max_examples=num_examples, derandomize=False, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    def check(given_request: tuple[str, bytes, Metadata]) -> None:
        name, data, pairs = given_request
        send(calls[name], data, pairs)

    for seed in fuzzing.seeds():
        hypothesis.seed(seed)(check)()
        target.check_unharmed()


def test_any_message_to_any_public_method(target: FuzzedProcesses, fuzzing: Fuzzing) -> None:
    services = [service for module in _SERVICES for service in module.DESCRIPTOR.services_by_name.values()]
    fuzz(target, fuzzing, target.frontend.channel, methods_of(*services), 500)


def test_any_message_to_the_servicer_of_gateways(target: FuzzedProcesses, fuzzing: Fuzzing) -> None:
    [service] = vllm_engine_pb2.DESCRIPTOR.services_by_name.values()
    request = vllm_engine_pb2.GenerateRequest(text="hello", request_id="one")
    request.sampling_params.max_tokens = 4
    _GOOD[request.DESCRIPTOR.full_name] = request
    fuzz(target, fuzzing, target.frontend.channel, methods_of(service), 300)


def test_any_message_to_the_admin_port(target: FuzzedProcesses, fuzzing: Fuzzing) -> None:
    service = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]
    with grpc.insecure_channel(f"127.0.0.1:{target.frontend.admin_port}") as channel:
        fuzz(target, fuzzing, channel, methods_of(service), 200)
