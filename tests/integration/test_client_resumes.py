"""Both clients go on with a stream that breaks, through real sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest

from fakes import fake_public_server
from fakes.fake_public_server import FakePublicServer
from stepwire.errors import EngineDeadError, InvalidRequestError, UnavailableError
from stepwire.v1 import chat_service_pb2, generation_service_pb2
from stepwire_client import AsyncClient, CallError, Client

REQUEST = generation_service_pb2.GenerateRequest(text="one two three four")
CHAT = chat_service_pb2.ChatRequest(messages=[{"role": chat_service_pb2.ROLE_USER, "content": [{"text": "one two"}]}])
DEATH = EngineDeadError("engine e1 is dead")


@pytest.fixture
def server() -> Iterator[FakePublicServer]:
    with fake_public_server.running() as fake:
        yield fake


def check_answer(events: list[generation_service_pb2.GenerateStreamResponse]) -> None:
    assert "".join(event.delta.text for event in events) == "ONE TWO THREE FOUR "
    assert [event.index for event in events] == list(range(6))
    assert events[-1].finished.usage.completion_tokens == 4
    assert not any(event.delta.token_ids for event in events)


def test_the_synchronous_client_goes_on_after_two_breaks(server):
    server.breaks = [(2, DEATH), (3, DEATH)]
    with Client(server.target) as client:
        check_answer(list(client.generate_stream(REQUEST, max_resumes=2, timeout_s=60)))
    assert [list(request.resume_output_token_ids.ids) for request in server.requests] == [[], [0], [0, 1]]
    assert {request.sampling.seed for request in server.requests[1:]} == {7}


async def test_the_asyncio_client_goes_on_after_two_breaks(server):
    server.breaks = [(2, DEATH), (3, DEATH)]
    async with AsyncClient(server.target) as client:
        check_answer([event async for event in client.generate_stream(REQUEST, max_resumes=2, timeout_s=60)])
    assert [list(request.resume_output_token_ids.ids) for request in server.requests] == [[], [0], [0, 1]]


async def test_a_chat_goes_on(server):
    server.breaks = [(2, DEATH)]
    async with AsyncClient(server.target) as client:
        events = [event async for event in client.chat_stream(CHAT, max_resumes=1)]
    assert "".join(event.delta.reasoning for event in events) == "Hm."
    assert "".join(event.delta.content for event in events) == "ONE TWO "
    server.breaks = [(2, DEATH)]
    with Client(server.target) as client:
        assert "".join(event.delta.content for event in client.chat_stream(CHAT, max_resumes=1)) == "ONE TWO "


def test_too_many_breaks_are_told_with_the_tokens_that_arrived(server):
    server.breaks = [(1, DEATH), (3, DEATH)]
    with Client(server.target) as client, pytest.raises(CallError) as caught:
        list(client.generate_stream(REQUEST, max_resumes=1))
    assert (caught.value.code, caught.value.tokens_emitted) == (grpc.StatusCode.UNAVAILABLE, 3)


def test_the_error_of_a_resumed_call_is_told(server):
    server.breaks = [(1, DEATH), (1, InvalidRequestError("no"))]
    with Client(server.target) as client, pytest.raises(CallError) as caught:
        list(client.generate_stream(REQUEST, max_resumes=5))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(server.requests) == 2


def test_a_wait_beyond_the_time_limit_is_not_begun(server):
    server.breaks = [(1, UnavailableError("starting", retry_after_ms=3_600_000))]
    with Client(server.target) as client, pytest.raises(CallError) as caught:
        list(client.generate_stream(REQUEST, max_resumes=5, timeout_s=60))
    assert caught.value.details.retry_after_s == 3600


async def test_a_server_that_knows_the_request_still_is_told_to_end_it(server):
    in_flight = InvalidRequestError("in flight", reason="DUPLICATE_REQUEST")
    server.breaks = [(2, DEATH), (1, in_flight)]
    async with AsyncClient(server.target) as client:
        check_answer([event async for event in client.generate_stream(REQUEST, max_resumes=2)])
    server.breaks = [(2, DEATH), (1, in_flight)]
    with Client(server.target) as client:
        check_answer(list(client.generate_stream(REQUEST, max_resumes=2)))
    assert server.aborted == ["r1", "r1"]


async def test_a_break_behind_the_end_takes_nothing_away(server):
    server.breaks = [(100, DEATH)] * 2
    with Client(server.target) as client:
        check_answer(list(client.generate_stream(REQUEST, max_resumes=2)))
    async with AsyncClient(server.target) as client:
        check_answer([event async for event in client.generate_stream(REQUEST, max_resumes=2)])
    assert len(server.requests) == 2


def test_several_choices_are_refused_before_any_call(server):
    request = generation_service_pb2.GenerateRequest(text="x", sampling={"n": 2})
    with Client(server.target) as client, pytest.raises(ValueError, match="2 choices"):
        client.generate_stream(request, max_resumes=1)
    assert not server.requests


def test_behind_one_name_only_those_who_serve_are_asked(server):
    with fake_public_server.running() as other:
        target = f"ipv4:{server.target},{other.target}"
        with Client(target, is_balanced=True) as client:
            # There is a connection to one of them first, and all calls go there until then.
            give_up = time.monotonic() + 60
            while not (server.requests and other.requests):
                assert time.monotonic() < give_up, (len(server.requests), len(other.requests))
                client.generate(REQUEST, timeout_s=60)
            server.set_serving(False)
            # The channel hears of it by a Watch of its own.
            in_a_row = 0
            while in_a_row < 20:
                num_before = len(server.requests)
                client.generate(REQUEST, timeout_s=60)
                in_a_row = in_a_row + 1 if len(server.requests) == num_before else 0
