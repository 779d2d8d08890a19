"""`stepwire generate --file`: inputs, order, failures of single requests, bounded concurrency, interruption."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fakes import fake_public_server
from fakes.fake_public_server import FakePublicServer
from stepwire.errors import InvalidRequestError
from stepwire_client.cli import app


@pytest.fixture
def server() -> Iterator[FakePublicServer]:
    with fake_public_server.running() as fake:
        yield fake


def run(server: FakePublicServer, file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["generate", "--file", str(file), "--target", server.target, *arguments])


def results(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def squeezed(text: str) -> str:
    """Without blanks and the frame of the error box, which breaks lines anywhere."""
    return re.sub(r"[\s│]", "", text)


def test_lines_are_prompts_and_results_keep_their_order(server, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {number}\n\n" for number in range(50)))
    result = run(server, file, "--max-tokens", "5")
    assert result.exit_code == 0
    lines = results(result.stdout)
    assert [line["index"] for line in lines] == list(range(50))
    assert [line["completions"][0]["text"] for line in lines] == [f"PROMPT {number} " for number in range(50)]
    assert {request.stop.max_tokens for request in server.requests} == {5}


def test_jsonl_fields_win_over_options(server, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text(
        '"just text"\n{"text": "own limit", "stop": {"max_tokens": 2}}\n'
        '{"token_ids": {"ids": [1]}, "request_id": "x"}\n'
    )
    assert run(server, file, "--max-tokens", "5", "--temperature", "0", "--concurrency", "1").exit_code == 0
    first, second, third = server.requests
    assert (first.text, first.stop.max_tokens) == ("just text", 5)
    assert (second.text, second.stop.max_tokens) == ("own limit", 2)
    assert (list(third.token_ids.ids), third.request_id) == ([1], "x")
    assert all(request.sampling.HasField("temperature") for request in server.requests)


def test_lists_and_switches_of_a_line_replace_those_of_the_options(server, tmp_path):
    file = tmp_path / "requests.jsonl"
    file.write_text(
        '{"text": "own", "stop": {"stop": ["B"], "ignoreEos": false}, "sampling": {"logit_bias": {"5": 1}}}\n'
        '{"text": "none", "stop": {"stop": []}}\n'
        '"options alone"\n'
    )
    options = ("--stop", "A", "--ignore-eos", "--logit-bias", "4=2", "--max-tokens", "9", "--concurrency", "1")
    assert run(server, file, *options).exit_code == 0
    own, none, alone = server.requests
    assert (list(own.stop.stop), own.stop.ignore_eos, dict(own.sampling.logit_bias)) == (["B"], False, {5: 1.0})
    assert (list(none.stop.stop), none.stop.ignore_eos, dict(none.sampling.logit_bias)) == ([], True, {4: 2.0})
    assert (list(alone.stop.stop), alone.stop.ignore_eos) == (["A"], True)
    assert {request.stop.max_tokens for request in server.requests} == {9}


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_only_a_newline_ends_a_line(server, tmp_path, name):
    file = tmp_path / name
    prompts = ["one\u2028line", "form\u0085feed"]
    file.write_text("\n".join(json.dumps(text, ensure_ascii=False) for text in prompts), encoding="utf-8")
    assert run(server, file, "--concurrency", "1").exit_code == 0
    received = [request.text for request in server.requests]
    assert received == (prompts if name.endswith("l") else [f'"{text}"' for text in prompts])


def test_a_file_that_is_no_text_is_wrong_usage(server, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"fine\n\xff\n")
    result = run(server, file)
    assert result.exit_code == 2
    assert squeezed("prompts.txt is not UTF-8 text") in squeezed(result.stderr)
    assert server.requests == []


def test_an_output_that_cannot_be_opened_is_named_before_anything_is_sent(server, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n")
    result = run(server, file, "--output", "/nonexistent/x")
    assert result.exit_code == 2
    assert "/nonexistent/x: No such file or directory" in result.stderr
    assert server.requests == []


@pytest.mark.parametrize("line", ['{"txet": "hi"}', "{}", "[1]", "3", "not json", '{"text": 5}'])
def test_a_bad_line_is_named_before_anything_is_sent(server, tmp_path, line):
    file = tmp_path / "requests.jsonl"
    file.write_text(f'"fine"\n{line}\n')
    result = run(server, file)
    assert result.exit_code == 2
    assert "requests.jsonl:2" in squeezed(result.stderr)
    assert server.requests == []


def test_one_failure_stops_no_other_request(server, tmp_path):
    server.failing_prompts["bad"] = InvalidRequestError.of_field("text", "is empty")
    file = tmp_path / "prompts.txt"
    file.write_text("good\nbad\ngood\n")
    output = tmp_path / "out.jsonl"
    result = run(server, file, "--output", str(output))
    assert result.exit_code == 1
    assert "1 of 3 requests failed" in result.stderr
    lines = results(output.read_text())
    assert ["completions" in line for line in lines] == [True, False, True]
    assert lines[1]["error"]["code"] == "INVALID_ARGUMENT"
    assert lines[1]["error"]["reason"] == "FIELD_INVALID"
    assert "is empty" in lines[1]["error"]["message"]


def test_concurrency_is_bounded(server, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("word\n" * 60)
    assert run(server, file, "--concurrency", "3").exit_code == 0
    assert server.max_concurrent <= 3
    assert len(server.requests) == 60


def test_ctrl_c_cancels_what_is_in_flight(server, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"quick"\n' + '"slow"\n' * 40)
    server.hangs = True
    command = [sys.executable, "-m", "stepwire_client.cli", "generate", "--file", str(file), "--target", server.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert server.was_called.wait(60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert server.was_cancelled.wait(60)
