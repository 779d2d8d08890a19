"""The `stepwire` command against a scripted server: what it sends, prints, and exits with."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner, Result

from fakes import fake_public_server
from fakes.fake_public_server import FakePublicServer
from stepwire.errors import FieldViolation, InvalidRequestError, OverloadedError, UnavailableError
from stepwire.v1 import common_pb2, generation_service_pb2
from stepwire.v1.embedding_service_pb2 import EmbedRequest
from stepwire_client import cli_logprobs
from stepwire_client.cli import app


@pytest.fixture
def server() -> Iterator[FakePublicServer]:
    with fake_public_server.running() as fake:
        yield fake


def run(server: FakePublicServer, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [*arguments, "--target", server.target], input=stdin)


def test_generate_streams_the_answer_alone_to_stdout(server):
    result = run(server, "generate", "hello there")
    assert result.exit_code == 0
    assert result.stdout == "HELLO THERE \n"
    assert "length" in result.stderr
    assert "3 prompt tokens" in result.stderr
    assert "2 completion tokens" in result.stderr


def test_generate_reads_a_piped_prompt(server):
    assert run(server, "generate", stdin="from a pipe").stdout == "FROM A PIPE \n"


def test_unset_options_stay_unset(server):
    run(server, "generate", "hi", "--max-resumes", "0")
    assert server.requests == [generation_service_pb2.GenerateRequest(text="hi", sampling={}, stop={}, output={})]


def test_every_option_reaches_its_field(server):
    result = run(
        server, "generate", "--prompt-token-ids", "1, 2,3", "--temperature", "0", "--top-p", "0.5", "--top-k", "0",
        "--min-p", "0.25", "--presence-penalty", "-1", "--frequency-penalty", "1", "--repetition-penalty", "1.5",
        "--seed", "-1", "-n", "2", "--logit-bias", "5=-1.5", "--logit-bias", "6=2", "--allowed-token-id", "7",
        "--bad-word", "no", "--max-tokens", "9", "--min-tokens", "2", "--stop", "a", "--stop", "b",
        "--stop-token-id", "8", "--ignore-eos", "--include-stop", "--repetition-detection", "8:1:4", "--token-ids",
        "--echo", "--timings", "--no-skip-special-tokens", "--min-chunk-tokens", "4", "--max-chunk-delay-ms", "50",
        "--resume-token-ids", "10,11", "--no-add-special-tokens", "--truncate-prompt-tokens", "-1",
        "--logprobs", "0", "--prompt-logprobs", "-1", "--logprob-token-id", "3", "--logprob-token-id", "4",
        "--priority", "-4", "--client-class", "gold",
        "--queue-timeout-ms", "0", "--cache-salt", "s", "--bypass-prefix-cache", "--model", "m", "--request-id", "id",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    expected = generation_service_pb2.GenerateRequest(
        request_id="id",
        model="m",
        token_ids={"ids": [1, 2, 3]},
        sampling={
            "temperature": 0, "top_p": 0.5, "top_k": 0, "min_p": 0.25, "presence_penalty": -1, "frequency_penalty": 1,
            "repetition_penalty": 1.5, "seed": -1, "n": 2, "logit_bias": {5: -1.5, 6: 2.0}, "allowed_token_ids": [7],
            "bad_words": ["no"],
        },
        stop={
            "max_tokens": 9, "min_tokens": 2, "stop": ["a", "b"], "stop_token_ids": [8], "ignore_eos": True,
            "include_stop_in_output": True,
            "repetition_detection": {"max_pattern_tokens": 8, "min_pattern_tokens": 1, "min_repeats": 4},
        },
        output={
            "token_ids": True, "echo_prompt": True, "timings": True, "skip_special_tokens": False,
            "min_chunk_tokens": 4, "max_chunk_delay_ms": 50, "logprobs": 0, "prompt_logprobs": -1,
            "logprob_token_ids": [3, 4],
        },
        kv={"cache_salt": "s", "bypass_prefix_cache": True},
        priority=-4,
        queue_timeout_ms=0,
        truncate_prompt_tokens=-1,
        add_special_tokens=False,
        resume_output_token_ids={"ids": [10, 11]},
    )  # fmt: skip
    assert server.requests == [expected]
    assert server.client_classes == ["gold"]


def test_log_probabilities_are_told_beside_the_answer(server):
    result = run(server, "generate", "a b", "--logprobs", "6", "--prompt-logprobs", "1")
    assert result.stdout == "A B \n"
    lines = [" ".join(line.replace("│", " ").split()) for line in result.stderr.splitlines()]
    assert '"[b]" 7 -1.2500 2' in " | ".join(lines)
    assert any(line.startswith("(first)") for line in lines)
    assert any(line.startswith('"B " 7 -0.5000 2 "\\xf0\\x9f" 0.00') for line in lines)
    # One row of the prompt and two of the answer, each with the first five of six.
    assert result.stderr.count("\\xf0\\x9f") == 15
    assert "…" in result.stderr


@pytest.mark.parametrize(
    ("token_bytes", "shown"),
    [(b" a", '" a"'), (b"\n\x1b[", '"\\n\\x1b["'), ("é".encode(), '"é"'), (b"\xc3", '"\\xc3"'), (b"", '""')],
)
def test_bytes_of_a_token_are_shown_without_harm(token_bytes, shown):
    assert cli_logprobs.show(token_bytes) == shown


def test_without_asking_nothing_is_said_about_log_probabilities(server):
    assert "log-probability" not in run(server, "generate", "a b").stderr


def test_choices_arrive_interleaved_but_are_shown_one_by_one(server):
    result = run(server, "generate", "a b", "-n", "2", "--temperature", "1")
    assert result.stdout == "[0] A B \n[1] A B \n"


def test_json_shows_every_message(server):
    lines = [json.loads(line) for line in run(server, "generate", "é", "--json").stdout.splitlines()]
    assert [next(key for key in line if key != "index") for line in lines] == ["accepted", "delta", "finished"]
    assert lines[1]["delta"]["text"] == "É "


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--max-tokens", "-1", "--max-tokens"),
        ("--seed", str(2**63), "--seed"),
        ("--logit-bias", "x=1", "ID=BIAS"),
        ("--logit-bias", "-4=1", "--logit-bias"),
        ("--repetition-detection", "8:1", "MAX:MIN:REPEATS"),
        ("--prompt-token-ids", "1,two", "--prompt-token-ids"),
    ],
)
def test_wrong_usage_names_the_option(server, flag, value, said):
    result = run(server, "generate", "hi", flag, value)
    assert result.exit_code == 2
    assert said in result.stderr
    assert server.requests == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hi", "--prompt-token-ids", "1"], "two prompts"),
        (["-", "--prompt-token-ids", "1"], "two prompts"),
        (["hi", "--output", "answers.jsonl"], "--output has no meaning without --file"),
        (["hi", "--concurrency", "2"], "--concurrency has no meaning without --file"),
        (["hi", "--file", "PROMPTS"], "PROMPT has no meaning with --file"),
        (["--file", "PROMPTS", "--prompt-token-ids", "1"], "--prompt-token-ids has no meaning with --file"),
        (["--file", "PROMPTS", "--request-id", "r"], "--request-id"),
    ],
)
def test_options_of_which_one_would_be_ignored_are_refused(server, tmp_path, arguments, said):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    result = run(server, "generate", *[str(prompts) if text == "PROMPTS" else text for text in arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert server.requests == []


def stepwire(*arguments: str | bytes, stdin: bytes | int = subprocess.DEVNULL, stdout: int | IO[bytes] | None = None):
    """The command in a process of its own: only there do its words and streams hold raw bytes."""
    words = [sys.executable, "-m", "stepwire_client.cli", *arguments]
    given = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    done = subprocess.run(words, stdout=stdout or subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, **given)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", b"\xff"],
        ["generate", "hi", "--stop", b"\xff"],
        ["generate", "hi", "--target", b"\xff"],
        ["tokenize", "fine", b"\xff"],
    ],
)
def test_a_word_that_is_no_text_is_wrong_usage(arguments):
    code, errors = stepwire(*arguments)
    assert code == 2
    assert "not UTF-8" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", ["generate", "tokenize"])
def test_input_that_is_no_text_is_wrong_usage(command):
    code, errors = stepwire(command, stdin=b"fine, then \xff")
    assert code == 2
    assert "standard input is not UTF-8" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("command", ["generate", "tokenize"])
def test_a_terminal_is_not_waited_for(command):
    master, terminal = pty.openpty()
    try:
        code, errors = stepwire(command, stdin=terminal)
    finally:
        os.close(master)
        os.close(terminal)
    assert code == 2
    assert "pipe one in" in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("arguments", [["generate", "hi"], ["tokenize", "hi"], ["models"], ["health"]])
def test_output_that_cannot_be_written_is_one_sentence(server, arguments):
    with Path("/dev/full").open("wb") as full:
        code, errors = stepwire(*arguments, "--target", server.target, stdout=full)
    assert code == 1
    assert "error: the answer cannot be written: [Errno 28]" in errors
    assert "Traceback" not in errors


def test_a_refused_request_lists_its_fields(server):
    violations = (
        FieldViolation("sampling.top_p", "must be in (0, 1], got 7"),
        FieldViolation("stop.max_tokens", "must be at least 1, got 0"),
    )
    server.error = InvalidRequestError("2 fields are invalid", violations=violations)
    result = run(server, "generate", "hi", "--top-p", "7")
    assert result.exit_code == 1
    assert "sampling.top_p: must be in (0, 1], got 7" in result.stderr
    assert "stop.max_tokens: must be at least 1, got 0" in result.stderr
    assert result.stdout == ""


def test_overload_says_when_to_come_back(server):
    server.error = OverloadedError("1024 requests wait", retry_after_ms=1500)
    assert "try again in 1.5 s" in run(server, "generate", "hi").stderr


def test_a_server_that_is_down_is_named_with_the_cure():
    with socket.socket() as probe:
        # Bound and not listening: nobody else can listen there either.
        probe.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{probe.getsockname()[1]}"
        for command in (["generate", "hi"], ["models"], ["health"], ["tokenize", "hi"]):
            result = CliRunner().invoke(app, [*command, "--target", target])
            assert result.exit_code == 1
            assert f"cannot reach a stepwire server at {target}; `make run` starts one" in result.stderr


def test_a_passed_timeout_is_told_apart(server):
    server.hangs = True
    result = run(server, "generate", "hi", "--timeout", "0.5")
    assert result.exit_code == 1
    assert "no complete answer within 0.5 s (--timeout)" in result.stderr


def test_ctrl_c_cancels_the_request(server):
    server.hangs = True
    command = [sys.executable, "-m", "stepwire_client.cli", "generate", "hi", "--target", server.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == "HI "
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert server.was_cancelled.wait(60)


def test_tokenize(server):
    result = run(server, "tokenize", "ab", "c", "--offsets")
    assert result.stdout == "97 98\n0-1 1-2\n99\n0-1\n"
    assert "2 tokens, the model takes 64" in result.stderr
    assert json.loads(run(server, "tokenize", "a", "--json").stdout)["encodings"] == [{"token_ids": [97]}]


def test_embed_prints_a_line_of_numbers_for_each_text(server):
    result = run(server, "embed", "one two", "three")
    assert result.stdout == "3.5 2\n2.5 1\n"
    assert "6 tokens, 2 dimensions" in result.stderr
    assert run(server, "embed", stdin="from a pipe").stdout == "5.5 3\n"
    answer = json.loads(run(server, "embed", "a", "--json").stdout)
    assert answer["embeddings"] == [{"values": [0.5, 1.0]}]


def test_options_of_embed_reach_their_fields_and_others_stay_unset(server):
    options = ("--dimensions", "3", "--no-normalize", "--truncate-prompt-tokens", "-1", "--no-add-special-tokens")
    run(server, "embed", "a", "--priority", "2", "--request-id", "x", "--model", "m", *options)
    run(server, "embed", "a")
    [full, plain] = server.embeds
    assert (full.dimensions, full.normalize, full.truncate_prompt_tokens, full.priority) == (3, False, -1, 2)
    assert (full.add_special_tokens, full.request_id, full.model) == (False, "x", "m")
    assert plain == EmbedRequest(inputs=[EmbedRequest.Input(text="a")])


def test_a_refused_embed_fails_in_one_sentence(server):
    server.error = InvalidRequestError("this model does not pool", reason="UNSUPPORTED_FEATURE")
    result = run(server, "embed", "a")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "does not pool" in result.stderr


def test_models(server):
    assert "FakeForCausalLM" in run(server, "models").stdout
    assert json.loads(run(server, "models", "--json").stdout)["id"] == "tiny"


def test_health_exits_by_the_answer(server):
    assert run(server, "health").exit_code == 0
    server.set_serving(False)
    result = run(server, "health")
    assert result.exit_code == 1
    assert "NOT_SERVING" in result.stdout


def test_lookups_are_retried_while_the_server_starts(server):
    server.error = UnavailableError("still loading", retry_after_ms=100)
    result = run(server, "models")
    assert "the engine is still starting: still loading; try again in 0.1 s" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "constraint"),
    [
        (["--json-schema", '{"type": "object"}'], {"json_schema": '{"type": "object"}'}),
        (["--json-schema", "true"], {"json_schema": "true"}),
        (["--json-schema", "FILE"], {"json_schema": "größe"}),
        (["--json-object"], {"json_object": {}}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--regex", ""], {"regex": ""}),
        (["--grammar", "FILE"], {"grammar": "größe"}),
        (["--choice", "yes", "--choice", "no"], {"choice": {"choices": ["yes", "no"]}}),
        (["--structural-tag", "FILE"], {"structural_tag": "größe"}),
    ],
)
def test_each_constraint_reaches_its_field(server, tmp_path, arguments, constraint):
    file = tmp_path / "constraint.txt"
    file.write_text("größe", encoding="utf-8")
    run(server, "generate", "hi", *(str(file) if argument == "FILE" else argument for argument in arguments))
    assert server.requests[0].structured_output == common_pb2.StructuredOutput(**constraint)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--regex", "a", "--choice", "b"], "only one constraint"),
        (["--json-schema", "no-such-file"], "neither a JSON object nor a file"),
        (["--grammar", "no-such-file"], "--grammar"),
    ],
)
def test_a_constraint_that_is_none_is_wrong_usage(server, arguments, said):
    result = run(server, "generate", "hi", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert server.requests == []
