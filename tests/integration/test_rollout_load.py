"""The load of the roll-out tests sees what it is there for, and runs as a program, as it does in a pod."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout_load
from fakes import fake_public_server
from fakes.fake_public_server import FakePublicServer
from rollout_load import Answer, Load, differences, parse_answers, text_request
from stepwire.errors import InvalidRequestError, UnavailableError
from stepwire_client import AsyncClient

PROGRAM = Path(rollout_load.__file__)
# Of the first requests of the load.
WORDS = [7, 9, 11]


@pytest.fixture
def server() -> Iterator[FakePublicServer]:
    with fake_public_server.running() as fake:
        yield fake


async def answers_of(server: FakePublicServer, num_streams: int = 3) -> list[Answer]:
    async with AsyncClient(server.target) as client:
        return await Load(client, lambda number: text_request(number, 8), num_streams, concurrency=1).stop()


async def test_a_stream_that_breaks_goes_on_and_is_counted(server: FakePublicServer) -> None:
    server.breaks = [(2, UnavailableError("draining", retry_after_ms=0))]
    answers = await answers_of(server)
    assert [answer.num_resumes for answer in answers] == [1, 0, 0]
    assert [answer.token_ids for answer in answers] == [tuple(range(count)) for count in WORDS]


async def test_a_stream_that_nobody_accepted_is_asked_for_again(server: FakePublicServer) -> None:
    server.error = UnavailableError("draining", retry_after_ms=0)
    async with AsyncClient(server.target) as client:
        load = Load(client, lambda number: text_request(number, 8), 1, concurrency=1)
        await asyncio.to_thread(server.was_called.wait, 30)
        server.error = None
        [answer] = await load.stop()
    assert answer.num_repeats > 0
    assert (answer.error, answer.token_ids) == ("", tuple(range(WORDS[0])))


async def test_a_failure_and_other_tokens_are_told(server: FakePublicServer) -> None:
    undisturbed = await answers_of(server)
    server.breaks = [(2, InvalidRequestError("no"))]
    failed = await answers_of(server)
    assert differences(failed, undisturbed) == ["stream 0 failed after 2 tokens: INVALID_ARGUMENT FIELD_INVALID: no"]
    other = Answer(1, (1, 2), 0, 0)
    assert differences([other], undisturbed) == ["stream 1 has other tokens than the undisturbed run"]
    assert differences(undisturbed, undisturbed) == []


def test_the_program_prints_each_answer_once_its_input_ends(server: FakePublicServer) -> None:
    command = [sys.executable, str(PROGRAM), "--target", server.target, "--streams", "5", "--concurrency", "2"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=True)
    answers = parse_answers(done.stdout.splitlines())
    # Some twice, where the load has begun anew before it heard of the end.
    assert {answer.number for answer in answers} == {0, 1, 2, 3, 4}
    assert not any(answer.error for answer in answers)
    with pytest.raises(ValueError):
        parse_answers(["Traceback (most recent call last):"])
