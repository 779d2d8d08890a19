"""A process dies in the middle of an answer, and the answer of the resuming clients is the undisturbed one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from running_stack import SERVING, Frontend, Stack, running_stack, wait_until_zero
from stepwire.v1 import common_pb2
from stepwire.v1.chat_service_pb2 import ROLE_USER, ChatRequest, ChatStreamResponse
from stepwire.v1.generation_service_pb2 import GenerateRequest, GenerateStreamResponse
from stepwire_client import AsyncClient, Client

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
# So many that none is over before the process dies, also on a busy machine.
NUM_TOKENS = 60
QUESTION = {"role": ROLE_USER, "content": [{"text": "Count from one to fifty in words."}]}
CHAT = ChatRequest(messages=[QUESTION], sampling={"temperature": 0}, stop={"max_tokens": NUM_TOKENS})


class Pair:
    """Two engines, and frontends before both of them."""

    def __init__(self, stack: Stack) -> None:
        self.engines = {f"e{number}": stack.engine("--engine-id", f"e{number}") for number in range(2)}
        self._stack = stack

    def frontend(self) -> Frontend:
        frontend = self._stack.frontend(*self.engines.values())
        frontend.wait_for_health(SERVING)
        return frontend


@pytest.fixture(scope="module")
def pair(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        yield Pair(stack)


def request(temperature: float) -> GenerateRequest:
    return GenerateRequest(
        text="Once upon a time",
        sampling=common_pb2.SamplingParams(temperature=temperature, seed=5, repetition_penalty=1.1),
        stop=common_pb2.StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True),
    )


def text_of(events: list[GenerateStreamResponse]) -> str:
    return "".join(event.delta.text for event in events)


def content_of(events: list[ChatStreamResponse]) -> str:
    assert events[-1].HasField("finished")
    return "".join(event.delta.content for event in events)


def check_whole(events: list[GenerateStreamResponse], undisturbed: str) -> None:
    assert text_of(events) == undisturbed
    assert [event.index for event in events] == list(range(len(events)))
    assert events[-1].finished.usage.completion_tokens == NUM_TOKENS


def test_a_frontend_dies_and_the_answer_goes_on_at_another(pair: Pair) -> None:
    """Nobody says why: the connection is gone."""
    frontends = [pair.frontend() for _ in range(2)]
    with Client("ipv4:" + ",".join(f"127.0.0.1:{one.port}" for one in frontends), is_balanced=True) as client:
        undisturbed = text_of(list(client.generate_stream(request(0.8), timeout_s=TIMEOUT_S)))
        for one in frontends:
            wait_until_zero(one, "stepwire_frontend_requests_in_flight")
        stream = client.generate_stream(request(0.8), timeout_s=TIMEOUT_S, max_resumes=5)
        events = [next(stream) for _ in range(2)]
        [serving] = [one for one in frontends if one.metric("stepwire_frontend_requests_in_flight")]
        serving.kill()
        check_whole([*events, *stream], undisturbed)


Event = GenerateStreamResponse | ChatStreamResponse
# A stream and what it has delivered.
Begun = tuple[Iterator[Any] | AsyncIterator[Any], list[Any]]


async def begun_on(engine_id: str, start: Callable[[], Iterator[Event] | AsyncIterator[Event]]) -> list[Begun]:
    """Streams that have delivered something, as many as it takes for one on this engine: reports of loads come late."""
    begun: list[Begun] = []
    while not any(events[0].accepted.engine_id == engine_id for _, events in begun):
        stream = start()
        begun.append((stream, [await following(stream) for _ in range(2)]))
    return begun


async def following(stream: Iterator[Event] | AsyncIterator[Event]) -> Event:
    return await anext(stream) if isinstance(stream, AsyncIterator) else next(stream)


async def whole(begun: Begun) -> list[Any]:
    stream, events = begun
    rest = [event async for event in stream] if isinstance(stream, AsyncIterator) else list(stream)
    return [*events, *rest]


async def test_an_engine_dies_under_each_client_and_a_chat(pair: Pair) -> None:
    target = f"127.0.0.1:{pair.frontend().port}"
    with Client(target) as client:
        async with AsyncClient(target) as aio_client:
            undisturbed = text_of(list(client.generate_stream(request(0.8), timeout_s=TIMEOUT_S)))
            chat_undisturbed = content_of(list(client.chat_stream(CHAT, timeout_s=TIMEOUT_S)))
            options = {"timeout_s": TIMEOUT_S, "max_resumes": 5}
            streams = await begun_on("e0", lambda: client.generate_stream(request(0.8), **options))
            streams += await begun_on("e0", lambda: aio_client.generate_stream(request(0.8), **options))
            chats = await begun_on("e0", lambda: client.chat_stream(CHAT, **options))
            pair.engines["e0"].kill()
            for stream in streams:
                check_whole(await whole(stream), undisturbed)
            for chat in chats:
                assert content_of(await whole(chat)) == chat_undisturbed
