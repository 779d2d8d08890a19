"""What the log of a frontend has about requests: a line for each at DEBUG, and nothing for tokens."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from fakes.fake_engine import FakeEngine
from frontend.choice_state import ChoiceState
from running_frontend import SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACED = (("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01"),)
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


def only_line(caplog: pytest.LogCaptureFixture, name: str) -> logging.LogRecord:
    (line,) = [line for line in caplog.records if line.name == name and line.levelno != logging.INFO]
    return line


async def test_a_failure_of_output_processing_has_the_ids_of_its_request(
    frontend: RunningFrontend, caplog, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: object) -> None:
        raise ValueError("no text")

    monkeypatch.setattr(ChoiceState, "process", fail)
    failure = await failure_of(frontend.generation.Generate(request("hello", request_id="r1"), metadata=TRACED))
    assert failure.reason == "OUTPUT_PROCESSING"
    line = only_line(caplog, "frontend.processing_failures")
    assert (line.request_id, line.trace_id, line.stage) == ("r1", TRACE_ID, "detokenize")


async def test_a_request_that_goes_to_another_engine_is_named_in_the_line(
    engine: FakeEngine, tokenizer_dir: Path, tmp_path: Path, caplog
):
    async with FakeEngine(tokenizer_dir, engine_id="fake-1", vocab_size=400).running() as other:
        refusal = common_pb2.EngineError(reason="QUEUE_FULL", message="full", grpc_code=8)
        for one, another in ((engine, other), (other, engine)):
            one.reject = lambda add, another=another: None if another.adds else refusal
        async with running_frontend(engine.endpoint, other.endpoint, cache_dir=tmp_path / "cache") as frontend:
            await frontend.wait_for_health(SERVING)
            connections = frontend.process.frontend.pool.connections
            await frontend.wait_until(lambda: all(connection.is_available for connection in connections))
            await frontend.generation.Generate(request("hello", request_id="r1"), metadata=TRACED)
    line = only_line(caplog, "frontend.engine_client.pool")
    assert (line.request_id, line.trace_id) == ("r1", TRACE_ID)


async def test_the_log_does_not_grow_with_the_tokens(frontend: RunningFrontend, caplog):
    async def num_lines(message: GenerateRequest) -> int:
        before = len(caplog.records)
        await frontend.generation.Generate(message)
        await frontend.wait_idle()
        return sum(line.name.startswith(("frontend", "stepwire")) for line in caplog.records[before:])

    few = await num_lines(request("hello world", max_tokens=2))
    assert few == await num_lines(request("hello world", max_tokens=80)) == 1
