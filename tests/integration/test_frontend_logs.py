"""What the log of a frontend has about requests: a line for each at DEBUG, and nothing for tokens."""

from __future__ import annotations

import logging
import re

import pytest

from fakes.fake_engine import FakeEngine
from running_frontend import RunningFrontend, request
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

SAMPLING = common_pb2.SamplingParams(n=2, temperature=1, seed=40)


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


def ends(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [line for line in caplog.records if line.getMessage() == "request ended"]


async def test_a_request_has_one_line_that_says_how_it_ended(frontend: RunningFrontend, caplog):
    await frontend.generation.Generate(request("hello world", max_tokens=3, request_id="r1"))
    await frontend.wait_idle()
    (end,) = ends(caplog)
    assert end.levelno == logging.DEBUG
    found = (end.request_id, end.model, end.engine_id, end.prompt_tokens, end.completion_tokens, end.finish_reason)
    assert found == ("r1", "fake-model", "fake-0", "2", "3", "length")
    assert all(re.fullmatch(r"\d+", getattr(end, name)) for name in ("queue_ms", "prefill_ms", "decode_ms", "ttft_ms"))


async def test_every_choice_has_its_end_in_the_line(frontend: RunningFrontend, engine: FakeEngine, caplog):
    await frontend.generation.Generate(request("hello world", max_tokens=3, sampling=SAMPLING))
    engine.may_step.clear()
    stream = frontend.stream(request("hello world", max_tokens=3, sampling=SAMPLING))
    assert (await stream.next()).HasField("accepted")
    stream.call.cancel()
    await frontend.wait_idle()
    assert [end.finish_reason for end in ends(caplog)] == ["length,length", "abort,abort"]


async def test_the_log_does_not_grow_with_the_tokens(frontend: RunningFrontend, caplog):
    async def num_lines(message: GenerateRequest) -> int:
        before = len(caplog.records)
        await frontend.generation.Generate(message)
        await frontend.wait_idle()
        return sum(line.name.startswith(("frontend", "stepwire")) for line in caplog.records[before:])

    few = await num_lines(request("hello world", max_tokens=2))
    assert few == await num_lines(request("hello world", max_tokens=80)) == 1
