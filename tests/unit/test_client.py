"""The Python client: errors as one typed exception, streams that can be left, retries of short calls."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

import grpc
import pytest

from fakes import fake_public_server
from fakes.fake_public_server import SHORT_CALLS, FakePublicServer
from stepwire.errors import FieldViolation, InvalidRequestError, OverloadedError, UnavailableError
from stepwire.v1 import chat_service_pb2, generation_service_pb2
from stepwire.v1.embedding_service_pb2 import EmbedRequest
from stepwire_client import CallError, CallFacts, Client, Deadline

REQUEST = generation_service_pb2.GenerateRequest(text="one two three")
CHAT = chat_service_pb2.ChatRequest(messages=[{"role": chat_service_pb2.ROLE_USER, "content": [{"text": "one two"}]}])


@pytest.fixture
def server() -> Iterator[FakePublicServer]:
    with fake_public_server.running() as fake:
        yield fake


@pytest.fixture
def client(server: FakePublicServer) -> Iterator[Client]:
    with Client(server.target) as connected:
        yield connected


def test_stream_and_unary_give_the_same_text(client):
    text = "".join(event.delta.text for event in client.generate_stream(REQUEST))
    assert text == "ONE TWO THREE "
    assert client.generate(REQUEST).completions[0].text == text


def test_embed_gives_a_vector_for_each_input(client):
    inputs = [EmbedRequest.Input(text=text) for text in ("one two", "three")]
    response = client.embed(EmbedRequest(inputs=inputs))
    assert [list(one.values) for one in response.embeddings] == [[3.5, 2.0], [2.5, 1.0]]


def test_a_failed_embed_is_a_call_error(client, server):
    server.error = InvalidRequestError("no", reason="UNSUPPORTED_FEATURE")
    with pytest.raises(CallError) as caught:
        client.embed(EmbedRequest())
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


def test_the_class_of_a_client_goes_with_every_generation(server):
    with Client(server.target, client_class="gold") as client:
        list(client.generate_stream(REQUEST))
        client.generate(REQUEST)
        client.embed(EmbedRequest())
    assert server.client_classes == ["gold", "gold", "gold"]


def test_leaving_a_stream_early_cancels_it(client, server):
    server.hangs = True
    events = client.generate_stream(REQUEST)
    assert next(events).HasField("accepted")
    assert next(events).delta.text == "ONE "
    events.close()
    assert server.was_cancelled.wait(60)


def test_closing_the_client_ends_its_streams(client, server):
    server.hangs = True
    events = client.generate_stream(REQUEST)
    next(events)
    next(events)
    client.close()
    with pytest.raises(CallError) as caught:
        next(events)
    assert caught.value.code is grpc.StatusCode.CANCELLED
    assert server.was_cancelled.wait(60)


def test_an_error_carries_everything_the_server_said(client, server):
    violation = FieldViolation("sampling.top_p", "7 is outside (0, 1]")
    server.error = InvalidRequestError("1 field is invalid", violations=(violation,), metadata={"request_id": "r9"})
    with pytest.raises(CallError) as caught:
        list(client.generate_stream(REQUEST))
    error = caught.value
    assert (error.code, error.reason, error.message) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "FIELD_INVALID",
        "1 field is invalid",
    )
    assert [(item.field, item.description) for item in error.details.violations] == [
        (violation.field, violation.description)
    ]
    assert error.details.metadata["request_id"] == "r9"
    assert not error.is_retryable


def test_overload_is_retryable_and_says_when(client, server):
    server.error = OverloadedError("full", retry_after_ms=2500)
    with pytest.raises(CallError) as caught:
        client.generate(REQUEST)
    assert caught.value.is_retryable
    assert caught.value.details.retry_after_s == 2.5


def test_what_a_server_says_beside_the_answer_is_there_for_the_asking(client, server):
    server.headers, server.trailers = (("x-engine-id", "e1"),), (("endpoint-load-metrics", "text"),)
    for ask in (lambda **more: list(client.generate_stream(REQUEST, **more)), partial(client.generate, REQUEST)):
        facts = CallFacts()
        ask(facts=facts)
        assert (facts.headers["x-engine-id"], facts.trailers["endpoint-load-metrics"]) == ("e1", "text")
    server.error = OverloadedError("full", retry_after_ms=2500)
    facts = CallFacts()
    with pytest.raises(CallError) as caught:
        list(client.generate_stream(REQUEST, facts=facts))
    assert facts.trailers["grpc-retry-pushback-ms"] == "2500"
    assert caught.value.details.pushback_ms == 2500


def test_details_that_belong_to_another_status_are_left_out(client, server):
    server.status_over_error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "replaced on the way")
    server.error = InvalidRequestError.of_field("text", "is empty")
    with pytest.raises(CallError) as caught:
        list(client.generate_stream(REQUEST))
    error = caught.value
    assert (error.code, error.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "replaced on the way")
    assert (error.reason, error.details.violations) == ("", ())


def test_a_server_that_is_down_has_no_reason():
    with Client("127.0.0.1:1") as client, pytest.raises(CallError) as caught:
        list(client.generate_stream(REQUEST))
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.reason == ""
    assert not caught.value.is_retryable


def test_unary_calls_are_retried_and_streams_are_not(client, server):
    server.error = UnavailableError("starting")
    with pytest.raises(CallError):
        client.generate(REQUEST)
    assert len(server.requests) == 4
    with pytest.raises(CallError):
        list(client.generate_stream(REQUEST))
    assert len(server.requests) == 5


def test_health_of_an_unknown_service(client):
    assert client.health()
    with pytest.raises(CallError) as caught:
        client.health("no.such.Service")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


def test_a_chat_streamed_and_at_once(server):
    with Client(server.target, client_class="gold") as client:
        events = list(client.chat_stream(CHAT))
        answer = client.chat(CHAT)
    assert "".join(event.delta.content for event in events) == "ONE TWO "
    assert answer.choices[0].message.content[0].text == "ONE TWO"
    assert server.chats == [CHAT, CHAT]
    assert server.client_classes == ["gold", "gold"]


def test_a_chat_that_fails(client, server):
    server.error = InvalidRequestError.of_field("messages", "is empty")
    for call in (lambda: list(client.chat_stream(CHAT)), lambda: client.chat(CHAT)):
        with pytest.raises(CallError) as caught:
            call()
        assert caught.value.details.violations[0].field == "messages"


def test_the_prompt_of_a_chat_and_the_files_of_the_tokenizer(client):
    assert client.render_chat(CHAT).text == "<one two>"
    assert client.tokenizer_archive() == b"PKzip"
    assert list(client.detokenize([[97, 98], []]).texts) == ["ab", ""]


@pytest.mark.parametrize("name", SHORT_CALLS)
def test_a_short_call_may_take_what_is_left_of_a_deadline_and_no_more(client, name: str):
    # Connections are taken, and nobody speaks.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        waiting = Client(f"127.0.0.1:{silent.getsockname()[1]}")
        with waiting, pytest.raises(CallError) as caught:
            getattr(waiting, name)(*SHORT_CALLS[name], timeout_s=Deadline.after(0).remaining())
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert getattr(client, name)(*SHORT_CALLS[name], timeout_s=Deadline.after(None).remaining())
