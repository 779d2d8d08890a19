"""The programs that make the calls of a conformance test: one for each client, all with the same lines in and out.

A runner is started as `RUNNER TARGET [CA_FILE]`, reads one call as JSON a line and answers one JSON line, in order,
until its input ends. It knows no expectation: those are in scenarios.yaml and in the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

import skips
from stepwire.v1 import admin_service_pb2 as admin
from stepwire.v1 import chat_service_pb2 as chat
from stepwire.v1 import embedding_service_pb2 as embedding
from stepwire.v1 import generation_service_pb2 as generation
from stepwire.v1 import model_service_pb2 as models
from stepwire.v1 import tokenization_service_pb2 as tokenization

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
PACKAGE = "stepwire.v1."

# Every runner has these, by the name without the package; each with the messages that it answers.
RESPONSES: dict[str, type[Message]] = {
    "GenerationService/Generate": generation.GenerateResponse,
    "GenerationService/GenerateStream": generation.GenerateStreamResponse,
    "GenerationService/Abort": generation.AbortResponse,
    "ChatService/Chat": chat.ChatResponse,
    "ChatService/ChatStream": chat.ChatStreamResponse,
    "EmbeddingService/Embed": embedding.EmbedResponse,
    "TokenizationService/Tokenize": tokenization.TokenizeResponse,
    "TokenizationService/Detokenize": tokenization.DetokenizeResponse,
    "ModelService/ListModels": models.ListModelsResponse,
}


@dataclass(frozen=True)
class Reply:
    """What a runner says of one call; the messages as the client decoded them, and the error in all its parts."""

    messages: list[Any]
    code: str
    message: str = ""
    reason: str = ""
    error_metadata: Mapping[str, str] = field(default_factory=dict)
    retry_delay_ms: int = 0
    field_violations: list[Mapping[str, str]] = field(default_factory=list)
    quota_violations: list[Mapping[str, str]] = field(default_factory=list)
    trailers: Mapping[str, str] = field(default_factory=dict)
    pushback_ms: int | None = None

    @property
    def fields(self) -> list[str]:
        return [violation["field"] for violation in self.field_violations]


class Runner:
    """One running runner program."""

    def __init__(self, name: str, command: list[str], target: str, *, ca_file: str = "", token: str = "") -> None:
        self.name = name
        self._process = subprocess.Popen(
            [*command, target, *([ca_file] if ca_file else [])],
            env={**os.environ, **({"STEPWIRE_TOKEN": token} if token else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def call(self, method: str, request: Mapping[str, Any], **options: Any) -> Reply:
        """`method` without the package. Options: timeout_ms, cancel_after_messages, metadata, resume."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"method": PACKAGE + method, "request": request, **options})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the {self.name} runner has ended with code {self._process.wait()}"
        fields = json.loads(answer)
        messages = [ParseDict(message, _response_class(method)()) for message in fields.pop("messages")]
        return Reply(messages=messages, **fields)

    def process_id(self) -> int:
        return self._process.pid

    def close(self) -> int:
        """The end of its input ends it; its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(30)
        self._process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = self.close()
        assert error is not None or code == 0, f"the {self.name} runner ended with code {code}"


def _response_class(method: str) -> type[Message]:
    service, name = method.split("/")
    return getattr(admin, f"{name}Response") if service == "AdminService" else RESPONSES[method]


def _python(script: str) -> list[str]:
    return [sys.executable, str(HERE / script)]


def node_program(package: str) -> list[str]:
    """The command of node, if this npm package is installed for the tests; otherwise the test is skipped."""
    node = skips.require_program("node", how="make system-deps")
    if not (ROOT / "node_modules" / package).is_dir():
        pytest.skip(f"needs the npm package {package}: make system-deps")
    return [node]


def _node() -> list[str]:
    return [*node_program("@grpc/grpc-js"), str(ROOT / "clients" / "node" / "conformance.js")]


def _built(language: str) -> list[str]:
    program = ROOT / "build" / "clients" / language / "conformance"
    if not program.is_file():
        pytest.skip(f"needs {program.relative_to(ROOT)}: make clients")
    return [str(program)]


# The commands; one that can not run here skips the test and says why.
RUNNERS: dict[str, Callable[[], list[str]]] = {
    "python": lambda: _python("python_runner.py"),
    "python-aio": lambda: _python("aio_runner.py"),
    "node": _node,
    "go": lambda: _built("go"),
    "cpp": lambda: _built("cpp"),
}
# Those whose library resumes streams by itself.
RESUMING = ["python", "python-aio", "node", "go", "cpp"]


def start(name: str, target: str, *, ca_file: str = "", token: str = "") -> Runner:
    """The runner of this name at this server, or a skip of the test."""
    return Runner(name, RUNNERS[name](), target, ca_file=ca_file, token=token)
