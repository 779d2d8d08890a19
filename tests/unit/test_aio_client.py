"""The asyncio client has the calls of the synchronous one, and what is its own: cancelling, closing, the loop."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from fakes import fake_public_server
from fakes.fake_public_server import SHORT_CALLS, FakePublicServer
from stepwire.errors import FieldViolation, InvalidRequestError, OverloadedError, UnavailableError
from stepwire.v1 import chat_service_pb2, generation_service_pb2
from stepwire_client import AsyncClient, CallError, CallFacts, Client, Deadline

REQUEST = generation_service_pb2.GenerateRequest(text="one two three")
CHAT = chat_service_pb2.ChatRequest(messages=[{"role": chat_service_pb2.ROLE_USER, "content": [{"text": "one two"}]}])
WAIT_S = 60


@pytest.fixture
def server() -> Iterator[FakePublicServer]:
    with fake_public_server.running() as fake:
        yield fake


@pytest.fixture
async def client(server: FakePublicServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.target, client_class="gold") as connected:
        yield connected


def public(kind: type) -> dict[str, list[tuple[str, object]]]:
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {
        name: [(parameter.name, parameter.default) for parameter in inspect.signature(method).parameters.values()]
        for name, method in methods
        if not name.startswith("_") or name == "__init__"
    }


def test_both_clients_have_the_same_calls_with_the_same_parameters():
    assert public(AsyncClient) == public(Client)


async def test_every_call_has_its_answer(client, server):
    events = [event async for event in client.generate_stream(REQUEST)]
    assert "".join(event.delta.text for event in events) == "ONE TWO THREE "
    assert (await client.generate(REQUEST)).completions[0].text == "ONE TWO THREE "
    assert "".join([event.delta.content async for event in client.chat_stream(CHAT)]) == "ONE TWO "
    assert (await client.chat(CHAT)).choices[0].message.content[0].text == "ONE TWO"
    assert server.client_classes == ["gold"] * 4
    assert (await client.render_chat(CHAT)).text == "<one two>"
    assert list((await client.tokenize(["ab"])).encodings[0].token_ids) == [97, 98]
    assert list((await client.detokenize([[97, 98], []])).texts) == ["ab", ""]
    assert await client.tokenizer_archive() == b"PKzip"
    assert [model.id for model in await client.models()] == ["tiny"]
    assert list((await client.abort(["r1"])).inactive_request_ids) == ["r1"]
    assert await client.health()


async def test_an_error_carries_everything_the_server_said(client, server):
    violation = FieldViolation("sampling.top_p", "7 is outside (0, 1]")
    server.error = InvalidRequestError("1 field is invalid", violations=(violation,))
    with pytest.raises(CallError) as caught:
        await client.generate(REQUEST)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert caught.value.details.violations[0].field == "sampling.top_p"
    server.error = OverloadedError("full", retry_after_ms=2500)
    with pytest.raises(CallError) as caught:
        [event async for event in client.generate_stream(REQUEST)]
    assert (caught.value.details.retry_after_s, caught.value.details.pushback_ms) == (2.5, 2500)


async def test_unary_calls_are_retried_and_streams_are_not(client, server):
    server.error = UnavailableError("starting")
    with pytest.raises(CallError):
        await client.generate(REQUEST)
    assert len(server.requests) == 4
    with pytest.raises(CallError):
        [event async for event in client.generate_stream(REQUEST)]
    assert len(server.requests) == 5


async def test_what_a_server_says_beside_the_answer_is_there_for_the_asking(client, server):
    server.headers, server.trailers = (("x-engine-id", "e1"),), (("endpoint-load-metrics", "text"),)
    streamed, whole = CallFacts(), CallFacts()
    assert [event async for event in client.generate_stream(REQUEST, facts=streamed)]
    await client.generate(REQUEST, facts=whole)
    for facts in (streamed, whole):
        assert (facts.headers["x-engine-id"], facts.trailers["endpoint-load-metrics"]) == ("e1", "text")
    server.error = OverloadedError("full", retry_after_ms=2500)
    facts = CallFacts()
    with pytest.raises(CallError):
        await client.generate(REQUEST, facts=facts)
    assert facts.trailers["grpc-retry-pushback-ms"] == "2500"


async def test_leaving_a_stream_early_cancels_it(client, server):
    server.hangs = True
    events = client.generate_stream(REQUEST)
    assert (await anext(events)).HasField("accepted")
    assert (await anext(events)).delta.text == "ONE "
    await events.aclose()
    assert await asyncio.to_thread(server.was_cancelled.wait, WAIT_S)


@pytest.mark.parametrize("max_resumes", [0, 3])
async def test_a_cancelled_task_cancels_its_call_and_is_not_resumed(client, server, max_resumes):
    server.hangs = True

    async def read() -> None:
        async for _ in client.generate_stream(REQUEST, max_resumes=max_resumes):
            pass

    reader = asyncio.create_task(read())
    assert await asyncio.to_thread(server.was_called.wait, WAIT_S)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await asyncio.to_thread(server.was_cancelled.wait, WAIT_S)
    assert len(server.requests) == 1


@pytest.mark.parametrize("max_resumes", [0, 3])
async def test_closing_the_client_is_an_error_of_its_calls_and_cancels_no_task(server, max_resumes):
    server.hangs = True
    client = AsyncClient(server.target)
    events = client.generate_stream(REQUEST, max_resumes=max_resumes)
    await anext(events)
    await anext(events)
    waiting = asyncio.create_task(anext(events))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(CallError) as caught:
        await waiting
    assert caught.value.code is grpc.StatusCode.CANCELLED
    with pytest.raises(CallError):
        await client.generate(REQUEST)
    assert await asyncio.to_thread(server.was_cancelled.wait, WAIT_S)


async def test_a_time_limit_of_a_call_and_of_the_callers_own(client, server):
    server.hangs = True
    with pytest.raises(CallError) as caught:
        await client.generate(REQUEST, timeout_s=0.05)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.generate(REQUEST)


@pytest.mark.parametrize("name", SHORT_CALLS)
async def test_a_short_call_may_take_what_is_left_of_a_deadline_and_no_more(client, name: str):
    # Connections are taken, and nobody speaks.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}") as waiting:
            with pytest.raises(CallError) as caught:
                await getattr(waiting, name)(*SHORT_CALLS[name], timeout_s=Deadline.after(0).remaining())
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await getattr(client, name)(*SHORT_CALLS[name], timeout_s=Deadline.after(None).remaining())
