"""The README's newcomer's guide: each block is taken out of it and run as it stands, but for the ports."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from running_stack import SERVING, free_port, running_stack
from skips import require_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
GUIDE = re.search(r"(?ms)^## Call it from any language\n(.*?)^## ", (ROOT / "README.md").read_text())[1]
TIMEOUT_S = 120


def block(client: str, language: str) -> str:
    """The first block of a language behind the client's name."""
    return re.search(rf"(?ms)^\*\*{client}\*\*.*?^```{language}\n(.*?)^```$", GUIDE)[1]


def command(client: str) -> str:
    """What the sentence of a client says to run."""
    return re.search(rf"(?ms)^\*\*{client}\*\*.*?run with `(.*?)`", GUIDE)[1]


class Checkout:
    """A directory that looks like the repository to a newcomer, next to a running stack."""

    def __init__(self, path: Path, port: int, http_port: int) -> None:
        self.path = path
        self._ports = {"127.0.0.1:50051": f"127.0.0.1:{port}", "127.0.0.1:8000": f"127.0.0.1:{http_port}"}
        self._bin = path / "bin"
        self._bin.mkdir()
        for name in ("clients", "build", "protos"):
            (path / name).symlink_to(ROOT / name)
        (path / ".venv").symlink_to(sys.prefix)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(self._with_ports(text))

    def add_program(self, name: str, script: str) -> None:
        (self._bin / name).write_text(script)
        (self._bin / name).chmod(0o755)

    def run(self, line: str) -> str:
        """What it printed; it must end well."""
        done = subprocess.run(
            ["bash", "-c", self._with_ports(line)],
            cwd=self.path,
            env={**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _with_ports(self, text: str) -> str:
        for documented, real in self._ports.items():
            text = text.replace(documented, real)
        return text


@pytest.fixture(scope="module")
def checkout(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        http_port = free_port()
        # The name that the embedded model has with `make run`.
        engine = stack.engine("--served-model-name", "SmolLM2-135M-Instruct")
        frontend = stack.frontend(engine, http_port=http_port)
        frontend.wait_for_health(SERVING)
        yield Checkout(tmp_path_factory.mktemp("checkout"), frontend.port, http_port)


def test_python(checkout: Checkout) -> None:
    checkout.write("hello.py", block("Python", "python"))
    assert len(checkout.run(command("Python")).split()) > 20


def test_node(checkout: Checkout) -> None:
    require_program("node", how="apt-get install nodejs")
    checkout.write("hello.mjs", block("Node", "js"))
    assert len(checkout.run(command("Node")).split()) > 20


def test_go(checkout: Checkout) -> None:
    require_program("go", how="make system-deps")
    if not (ROOT / "build/clients/go/path").is_dir():
        pytest.skip("needs the Go client: make clients")
    checkout.write("hello.go", block("Go", "go"))
    assert len(checkout.run(block("Go", "sh")).split()) > 20


def test_curl(checkout: Checkout) -> None:
    require_program("curl", how="apt-get install curl")
    lines = checkout.run(block("curl", "sh")).splitlines()
    assert len(lines) > 20
    assert [line for line in lines if line][-1] == "data: [DONE]"


def test_grpcurl(checkout: Checkout) -> None:
    if shutil.which("grpcurl") is None:
        buf = require_program("buf", how="npm ci")
        script = ROOT / "tests/fakes/grpcurl_by_buf.py"
        checkout.add_program("grpcurl", f'#!/bin/sh\nBUF="{buf}" exec "{sys.executable}" "{script}" "$@"\n')
    answer = checkout.run(block("grpcurl", "sh"))
    assert answer.count('"delta"') > 20
    assert '"finished"' in answer
