"""`stepwire bench` against scripted servers: what it sends, shows, and exits with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fakes import fake_openai_server, fake_public_server
from fakes.fake_openai_server import FakeOpenAIServer, token_event
from fakes.fake_public_server import FakePublicServer
from stepwire.errors import OverloadedError
from stepwire.v1 import common_pb2
from stepwire_client.cli import app

# Keys that other comparisons of servers read.
SHARED_KEYS = {
    "label", "kind", "concurrency", "requests", "output_tokens", "wall_s", "tok_s", "ttft_mean", "itl_mean",
    "t_start", "t_end",
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[FakePublicServer]:
    with fake_public_server.running() as fake:
        yield fake


@pytest.fixture
def http_server() -> Iterator[FakeOpenAIServer]:
    with fake_openai_server.running() as fake:
        yield fake


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"short": [[11, 12], [13, 14], [15, 16], [17, 18]]}))
    return file


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def lines(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_concurrency_is_a_line_with_the_keys_of_other_load_tools(server):
    result = run("--target", server.target, "--concurrency", "1,4", "--output-len", "3", "--json", "--label", "mine")
    assert result.exit_code == 0, result.output
    first, second = lines(result)
    assert set(first) >= SHARED_KEYS
    assert (first["concurrency"], first["requests"], first["output_tokens"]) == (1, 1, 3)
    assert (second["concurrency"], second["requests"], second["output_tokens"]) == (4, 4, 12)
    assert second["label"] == "mine"
    assert second["failed"] == 0
    assert second["tok_s"] > 0
    assert second["t_end"] >= second["t_start"]


def test_requests_are_greedy_and_of_the_lengths_asked_for(server):
    assert run(
        "--target", server.target, "--input-len", "20", "--shared-prefix-len", "5", "--output-len", "4",
        "--num-requests", "6", "--warm-up", "2", "--model", "tiny",
    ).exit_code == 0  # fmt: skip
    warm_ups, measured = server.requests[:2], server.requests[2:]
    assert len(measured) == 6
    for request in measured:
        assert request.model == "tiny"
        assert request.sampling.HasField("temperature")
        assert request.sampling.temperature == 0
        assert request.stop.ignore_eos
        assert request.stop.max_tokens == 4
        assert len(request.token_ids.ids) == 20
        # Below the size that the server tells.
        assert max(request.token_ids.ids) < 128
    assert len({tuple(request.token_ids.ids[:5]) for request in measured}) == 1
    assert not {tuple(request.token_ids.ids) for request in measured} & {tuple(w.token_ids.ids) for w in warm_ups}


def test_prompts_of_a_file_are_sent_as_they_are(server, prompts):
    arguments = ("--target", server.target, "--prompts", str(prompts), "--first-prompt", "3", "--warm-up", "0")
    result = run(*arguments, "--concurrency", "1", "--num-requests", "2", "--no-ignore-eos", "--json")
    assert [list(request.token_ids.ids) for request in server.requests] == [[17, 18], [11, 12]]
    assert not server.requests[0].stop.ignore_eos
    assert lines(result)[0]["kind"] == "short"


def test_an_open_loop_sends_all_requests_and_says_its_rate(server):
    result = run("--target", server.target, "--rate", "500", "--num-requests", "9", "--output-len", "2", "--json")
    [row] = lines(result)
    assert result.exit_code == 0
    assert (row["rate"], row["concurrency"], row["requests"], row["output_tokens"]) == (500, 0, 9, 18)


def test_a_failure_is_counted_by_reason_and_ends_with_1(server, prompts):
    server.failing_prompts["13 14"] = OverloadedError("no room", reason="QUEUE_FULL")
    arguments = ("--target", server.target, "--prompts", str(prompts), "--output-len", "2", "--concurrency", "4")
    result = run(*arguments, "--json")
    assert result.exit_code == 1
    [row] = lines(result)
    assert (row["requests"], row["failed"], row["errors"], row["output_tokens"]) == (4, 1, {"QUEUE_FULL": 1}, 6)
    result = run(*arguments)
    assert result.exit_code == 1
    assert "1 of 4 requests failed: 1 x QUEUE_FULL" in result.stdout


def test_an_answer_that_was_cancelled_is_a_failure(server):
    server.finish_reason = common_pb2.FINISH_REASON_CANCELLED
    result = run("--target", server.target, "--concurrency", "1", "--warm-up", "0", "--json")
    assert result.exit_code == 1
    assert lines(result)[0]["errors"] == {"FINISH_REASON_CANCELLED": 1}


def test_a_server_that_does_not_answer_in_time_is_a_failure(server):
    server.hangs = True
    result = run("--target", server.target, "--concurrency", "2", "--warm-up", "0", "--timeout", "0.2", "--json")
    assert result.exit_code == 1
    assert lines(result)[0]["errors"] == {"DEADLINE_EXCEEDED": 2}


def test_a_warm_up_that_fails_is_said_and_nothing_is_measured(server):
    server.error = None
    server.finish_reason = common_pb2.FINISH_REASON_CANCELLED
    result = run("--target", server.target)
    assert result.exit_code == 1
    assert "the warm-up failed: FINISH_REASON_CANCELLED" in result.stderr
    assert len(server.requests) == 1


def test_the_table_shows_throughput_and_percentiles(server):
    result = run("--target", server.target, "--concurrency", "2", "--output-len", "3")
    assert result.exit_code == 0
    for title in ("tok/s", "TTFT ms", "ITL ms", "E2E ms", "mean", "p50", "p90", "p99", "c=2"):
        assert title in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "1", "--rate", "2"], "exclude each other"),
        (["--concurrency", "1.5"], "whole numbers"),
        (["--concurrency", "0"], "above 0"),
        (["--rate", "inf"], "above 0"),
        (["--rate", "nan"], "above 0"),
        (["--input-len", "5:4"], "5:4"),
        (["--vocab-size", "10"], "at least 11"),
        (["--input-len", "5:9", "--shared-prefix-len", "5"], "below --input-len"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_sent(server, arguments, words):
    result = run("--target", server.target, *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert server.requests == []


def test_a_server_that_is_not_there_is_said_in_one_sentence():
    result = run("--target", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "cannot reach a stepwire server" in " ".join(result.stderr.split())


def test_ctrl_c_cancels_what_is_in_flight(server):
    server.hangs = True
    command = [sys.executable, "-m", "stepwire_client.cli", "bench", "--target", server.target, "--warm-up", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert server.was_called.wait(60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert server.was_cancelled.wait(60)


def test_http_requests_are_completions_with_token_ids(http_server):
    result = run("--url", http_server.url, "--model", "bench", "--concurrency", "3", "--output-len", "4", "--json")
    assert result.exit_code == 0, result.output
    [row] = lines(result)
    assert set(row) >= SHARED_KEYS
    assert (row["requests"], row["output_tokens"], row["label"]) == (3, 12, http_server.url)
    body = http_server.bodies[-1]
    assert len(body.pop("prompt")) == 64
    assert body == {
        "model": "bench", "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": 4,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_http_tokens_are_counted_without_usage_too(http_server):
    # Half a character has no text and is a token; the event that only tells the end is none.
    http_server.events = [token_event("a"), token_event(""), token_event("b"), token_event("", "stop"), "[DONE]"]
    [row] = lines(run("--url", http_server.url, "--concurrency", "1", "--json"))
    assert (row["output_tokens"], row["failed"]) == (3, 0)


def test_http_events_may_have_null_choices(http_server):
    usage = {"choices": None, "usage": {"completion_tokens": 2}}
    http_server.events = [token_event("ab"), token_event("", "stop"), usage, "[DONE]"]
    [row] = lines(run("--url", http_server.url, "--concurrency", "1", "--json"))
    assert (row["output_tokens"], row["failed"]) == (2, 0)


@pytest.mark.parametrize(
    "content", [{"own": [[1]]}, {"shared": [1]}, {"shared": 1, "own": [2]}, [1], ["a"], [[]]], ids=str
)
def test_a_prompts_file_that_is_none_is_said_before_anything_is_sent(server, prompts, content):
    prompts.write_text(json.dumps({"short": content}))
    result = run("--target", server.target, "--prompts", str(prompts))
    assert result.exit_code == 2
    assert "'short'" in result.stderr
    assert server.requests == []


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([token_event("a")], "INCOMPLETE"),
        ([{"error": {"message": "boom"}}], "SERVER_ERROR"),
        (["{oops"], "BAD_EVENT"),
        ([token_event("a", "abort"), "[DONE]"], "FINISH_REASON_ABORT"),
        ([token_event("", "stop"), "[DONE]"], "NO_TOKENS"),
        ([{"choices": None}, "[DONE]"], "INCOMPLETE"),
        ([{"choices": [None]}], "BAD_EVENT"),
        ([{"choices": 7}], "BAD_EVENT"),
        ([token_event("a", "stop"), {"choices": [], "usage": {"prompt_tokens": 3}}], "BAD_EVENT"),
        ([{"choices": [], "usage": {"completion_tokens": "many"}}], "BAD_EVENT"),
        ([{"choices": [], "usage": "much"}], "BAD_EVENT"),
        ([token_event("a" * 2**20, "stop"), "[DONE]"], "BAD_EVENT"),
        ([{"choices": [{"text": "a", "finish_reason": ["stop"]}]}], "FINISH_REASON_['STOP']"),
    ],
)
def test_http_failures_in_the_stream_are_counted(http_server, events, reason):
    http_server.events = events
    result = run("--url", http_server.url, "--concurrency", "1", "--warm-up", "0", "--json")
    assert result.exit_code == 1
    assert lines(result)[0]["errors"] == {reason: 1}


def test_http_statuses_and_broken_connections_are_counted(http_server):
    http_server.status = 503
    result = run("--url", http_server.url, "--concurrency", "2", "--warm-up", "0", "--json")
    assert (result.exit_code, lines(result)[0]["errors"]) == (1, {"HTTP_503": 2})
    result = run("--url", "http://127.0.0.1:1", "--concurrency", "1", "--warm-up", "0", "--json")
    assert (result.exit_code, lines(result)[0]["errors"]) == (1, {"ClientConnectorError": 1})
