"""The README's newcomer's guide: each block is taken out of it and run as it stands, but for the ports."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkout import Checkout
from free_ports import free_port
from running_stack import SERVING, greedy_by_default, running_stack
from skips import require_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
GUIDE = re.search(r"(?ms)^## Call it from any language\n(.*?)^## ", (ROOT / "README.md").read_text())[1]


def block(client: str, language: str) -> str:
    """The first block of a language behind the client's name."""
    return re.search(rf"(?ms)^\*\*{client}\*\*.*?^```{language}\n(.*?)^```$", GUIDE)[1]


def command(client: str) -> str:
    """What the sentence of a client says to run."""
    return re.search(rf"(?ms)^\*\*{client}\*\*.*?run with `(.*?)`", GUIDE)[1]


@pytest.fixture(scope="module")
def checkout(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    # Of the guide's answers, sampled, one in a hundred is too short for what is looked for.
    model_dir = greedy_by_default(embedded_model_dir, tmp_path_factory.mktemp("greedy"))
    with running_stack(model_dir, tmp_path_factory.mktemp("cache")) as stack:
        http_port = free_port()
        # The name that the embedded model has with `make run`.
        engine = stack.engine("--served-model-name", "SmolLM2-135M-Instruct")
        frontend = stack.frontend(engine, http_port=http_port)
        frontend.wait_for_health(SERVING)
        ports = {50051: frontend.port, 8000: http_port}
        yield Checkout(tmp_path_factory.mktemp("checkout"), ports)


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
