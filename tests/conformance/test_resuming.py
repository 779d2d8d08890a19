"""Clients that resume a broken stream: their users see one answer, and the server one continuation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conformance import checks, runners
from conformance.runners import Reply, Runner
from fakes import fragile_server
from fakes.fragile_server import NUM_TOKENS, SEED, Break, FragileServer
from stepwire.errors import InvalidRequestError, OverloadedError, RequestFailedError, UnavailableError

GENERATION = ("GenerationService/GenerateStream", {"text": "hello", "stop": {"max_tokens": NUM_TOKENS}})
CHAT = (
    "ChatService/ChatStream",
    {"messages": [{"role": "ROLE_USER", "content": [{"text": "hello"}]}], "stop": {"max_tokens": NUM_TOKENS}},
)
# Milliseconds instead of a client's own back-off, which has no need to be waited for here.
GONE = UnavailableError("the engine is gone", reason="ENGINE_DEAD", retry_after_ms=1)
# Runners resume a call this often.
MAX_RESUMES = 2


@pytest.fixture(scope="module", params=["python", "python-aio", "node", "go", "cpp"])
def started(request: pytest.FixtureRequest) -> Iterator[tuple[FragileServer, Runner]]:
    with fragile_server.running() as server, runners.start(request.param, server.target) as runner:
        yield server, runner


@pytest.fixture
def server(started: tuple[FragileServer, Runner]) -> FragileServer:
    server, _ = started
    server.reset()
    return server


@pytest.fixture
def runner(started: tuple[FragileServer, Runner]) -> Runner:
    return started[1]


def goes_on_behind(tokens: list[int], num_delivered: int) -> bool:
    """Whether a client that has so many tokens resumes with these; it may ask for its last one again."""
    return tokens == [10 + index for index in range(len(tokens))] and len(tokens) in (num_delivered, num_delivered - 1)


def resumed(runner: Runner, method: str, request: dict[str, Any]) -> Reply:
    return runner.call(method, request, resume=True)


def assert_is_one_answer(reply: Reply) -> None:
    assert reply.code == "OK", f"{reply.reason} {reply.message}"
    assert checks.text_of(reply) == "0 1 2 3 4 5 "
    assert [message.index for message in reply.messages] == list(range(NUM_TOKENS + 2))
    assert [checks.kind(message) for message in reply.messages] == ["accepted", *["delta"] * NUM_TOKENS, "finished"]


@pytest.mark.parametrize(("method", "request_"), [GENERATION, CHAT], ids=["generation", "chat"])
def test_an_answer_is_whole_over_streams_that_break(
    server: FragileServer, runner: Runner, method: str, request_: dict[str, Any]
):
    server.breaks = [Break(GONE, 2), Break(GONE, 0)]
    assert_is_one_answer(resumed(runner, method, request_))
    first, *others = (list(request.resume_output_token_ids.ids) for request in server.requests)
    assert first == []
    assert [goes_on_behind(tokens, 2) for tokens in others] == [True, True]
    assert [request.sampling.seed for request in server.requests] == [0, SEED, SEED]
    assert [request.request_id for request in server.requests] == ["", "assigned", "assigned"]
    assert all(request.output.token_ids for request in server.requests)


@pytest.mark.parametrize("name", runners.RESUMING)
@pytest.mark.parametrize(("method", "request_"), [GENERATION, CHAT], ids=["generation", "chat"])
def test_an_answer_whose_end_alone_was_lost_gets_its_end(name: str, method: str, request_: dict[str, Any]):
    with fragile_server.running() as server, runners.start(name, server.target) as runner:
        server.breaks = [Break(GONE, NUM_TOKENS)]
        assert_is_one_answer(resumed(runner, method, request_))
        assert len(server.requests) == 2


def test_a_call_that_goes_on_keeps_its_id_and_repeats_nothing(server: FragileServer, runner: Runner):
    method, request = CHAT
    server.breaks = [Break(GONE, 1), Break(GONE, 3)]
    reply = resumed(runner, method, {**request, "tools": [{"name": "look"}]})
    assert reply.code == "OK", reply.message
    calls = [call for message in reply.messages for call in message.delta.tool_calls]
    assert [(call.id, call.name) for call in calls] == [("call 1", "look"), *[("", "")] * (NUM_TOKENS - 1)]
    assert "".join(call.arguments for call in calls) == "0 1 2 3 4 5 "


def test_a_server_that_answers_otherwise_is_held_to_what_was_given(server: FragileServer, runner: Runner):
    server.breaks = [Break(GONE, 2)]
    server.num_shifted = 1
    assert_is_one_answer(resumed(runner, *GENERATION))
    assert [len(request.resume_output_token_ids.ids) for request in server.requests] == [0, 1, 2]


def test_a_client_that_was_too_slow_goes_on(server: FragileServer, runner: Runner):
    server.breaks = [Break(OverloadedError("too slow", reason="SLOW_CLIENT", retry_after_ms=1), 3)]
    assert_is_one_answer(resumed(runner, *GENERATION))


def test_a_server_that_still_holds_the_broken_stream_is_asked_again(server: FragileServer, runner: Runner):
    held = InvalidRequestError("in flight", reason="DUPLICATE_REQUEST", retry_after_ms=1)
    server.breaks = [Break(GONE, 2), Break(held)]
    assert_is_one_answer(resumed(runner, *GENERATION))
    assert all(goes_on_behind(list(request.resume_output_token_ids.ids), 2) for request in server.requests[1:])
    assert len(server.requests) == 3


def test_tokens_that_a_caller_resumes_from_stay_in_front(server: FragileServer, runner: Runner):
    method, request = GENERATION
    server.breaks = [Break(GONE, 1)]
    reply = resumed(runner, method, {**request, "resume_output_token_ids": {"ids": [10, 11]}})
    assert checks.text_of(reply) == "2 3 4 5 "
    first, second = (list(request.resume_output_token_ids.ids) for request in server.requests)
    assert first == [10, 11]
    assert goes_on_behind(second, 3)


def test_a_stream_that_breaks_too_often_fails_with_its_last_error(server: FragileServer, runner: Runner):
    server.breaks = [Break(GONE, 3), *[Break(GONE, 0)] * MAX_RESUMES]
    reply = resumed(runner, *GENERATION)
    assert (reply.code, reply.reason) == ("UNAVAILABLE", "ENGINE_DEAD")
    assert checks.text_of(reply) == "0 1 2 "
    assert len(server.requests) == MAX_RESUMES + 1


@pytest.mark.parametrize(
    "stop",
    [Break(GONE), Break(RequestFailedError("broken"), 2), Break(OverloadedError("full", retry_after_ms=1), 2)],
    ids=["before-accepted", "failed-alone", "other-overload"],
)
def test_other_failures_are_the_callers(server: FragileServer, runner: Runner, stop: Break):
    server.breaks = [stop]
    reply = resumed(runner, *GENERATION)
    assert reply.reason == stop.error.reason
    assert len(server.requests) == 1


def test_nothing_is_resumed_unless_asked(server: FragileServer, runner: Runner):
    server.breaks = [Break(GONE, 2)]
    reply = runner.call(*GENERATION)
    assert (reply.code, checks.text_of(reply)) == ("UNAVAILABLE", "0 1 ")
    assert len(server.requests) == 1
