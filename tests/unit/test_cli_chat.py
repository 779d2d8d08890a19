"""`stepwire chat` against a scripted server: what it sends, prints, keeps in the conversation, and exits with."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import json_format
from typer.testing import CliRunner, Result

from fakes import fake_public_server
from fakes.fake_public_server import FakePublicServer
from stepwire.errors import InvalidRequestError
from stepwire.v1 import chat_service_pb2 as pb
from stepwire_client.cli import app

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "b": 1, "a": 2}, "strict": True}


@pytest.fixture
def server() -> Iterator[FakePublicServer]:
    with fake_public_server.running() as fake:
        yield fake


def run(server: FakePublicServer, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments, "--target", server.target], input=stdin)


def said(role: str, text: str) -> dict[str, object]:
    return {"role": role, "content": [{"text": text}]}


def sent(server: FakePublicServer) -> list[dict[str, object]]:
    return [json_format.MessageToDict(chat, preserving_proto_field_name=True) for chat in server.chats]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([TOOL]))
    return file


def test_the_answer_alone_is_on_stdout(server):
    result = run(server, "hello there")
    assert (result.exit_code, result.stdout) == (0, "HELLO THERE \n")
    assert "Hm.\n" in result.stderr
    assert "stop · 3 prompt tokens" in result.stderr


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_a_question_from_a_pipe(server, arguments):
    assert run(server, *arguments, stdin="from a pipe").stdout == "FROM A PIPE \n"


def test_unset_options_stay_unset(server):
    run(server, "hi", "--max-resumes", "0")
    assert server.chats == [
        pb.ChatRequest(messages=[{"role": pb.ROLE_USER, "content": [{"text": "hi"}]}], sampling={}, stop={}, output={})
    ]


def test_every_option_reaches_its_field(server, tools):
    result = run(
        server, "hi", "--system", "Be brief.", "--tools", str(tools), "--tool-choice", "required",
        "--template-kwargs", '{"enable_thinking": false}', "--model", "m", "--temperature", "0", "--top-p", "0.5",
        "--top-k", "3", "--seed", "7", "--max-tokens", "9", "--stop", "a", "--timings", "--client-class", "gold",
        "--json-schema", '{"type": "object"}', "--max-resumes", "0",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert sent(server) == [
        {
            "model": "m",
            "messages": [said("ROLE_SYSTEM", "Be brief."), said("ROLE_USER", "hi")],
            "sampling": {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "seed": "7"},
            "stop": {"max_tokens": 9, "stop": ["a"]},
            "output": {"timings": True},
            "structured_output": {"json_schema": '{"type": "object"}'},
            "tools": [
                {
                    "name": "add",
                    "description": "Adds.",
                    "strict": True,
                    "parameters_json": json.dumps(TOOL["parameters"]),
                }
            ],
            "tool_choice": {"mode": "MODE_REQUIRED"},
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    assert server.client_classes == ["gold"]


def test_calls_are_shown_as_json_lines(server, tools):
    result = run(server, "hi", "--tools", str(tools), "--tool-choice", "add")
    assert result.stdout == 'HI \n{"name": "add", "arguments": {"a": 1}}\n'
    assert "tool_calls" in result.stderr
    assert sent(server)[0]["tool_choice"] == {"function_name": "add"}


def test_tools_as_openai_writes_them(server, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([{"type": "function", "function": TOOL}]))
    run(server, "hi", "--tools", str(file))
    assert sent(server)[0]["tools"][0]["name"] == "add"


def test_json_shows_every_message(server):
    lines = [json.loads(line) for line in run(server, "é", "--json").stdout.splitlines()]
    assert [set(line) - {"index"} for line in lines] == [{"accepted"}, {"delta"}, {"delta"}, {"finished"}]
    assert lines[2]["delta"]["content"] == "É "


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"function": 1}]', '[{"name": "f", "color": 1}]'])
def test_a_file_that_holds_no_tools_is_wrong_usage(server, tmp_path, text):
    file = tmp_path / "tools.json"
    file.write_text(text)
    result = run(server, "hi", "--tools", str(file))
    assert (result.exit_code, server.chats) == (2, [])


def test_template_kwargs_that_are_no_object(server):
    result = run(server, "hi", "--template-kwargs", "[1]")
    assert (result.exit_code, server.chats) == (2, [])
    assert "--template-kwargs" in result.stderr


def test_a_refusal_is_one_sentence(server):
    server.error = InvalidRequestError.of_field("messages", "the conversation is empty")
    result = run(server, "hi")
    assert result.exit_code == 1
    assert "messages: the conversation is empty" in result.stderr


def test_a_conversation_at_the_terminal_remembers_what_was_said(server):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "stepwire_client.cli", "chat", "--target", server.target],
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(slave)
    try:
        # An empty line is no turn, and Ctrl-D ends it.
        os.write(master, b"one\n\ntwo\n\x04")
        stdout, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        os.close(master)
    assert (process.returncode, stdout) == (0, "ONE \nTWO \n")
    assert [chat["messages"] for chat in sent(server)] == [
        [said("ROLE_USER", "one")],
        [said("ROLE_USER", "one"), said("ROLE_ASSISTANT", "ONE "), said("ROLE_USER", "two")],
    ]
