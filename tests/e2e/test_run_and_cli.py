"""What a newcomer does: the demo, the running stack, the command line, Ctrl-C. Real services, real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from free_ports import free_port

pytestmark = pytest.mark.slow

TIMEOUT_S = 120
STEPWIRE = Path(sys.executable).parent / "stepwire"


@pytest.fixture
def launcher_flags(embedded_model_dir: Path, tmp_path: Path) -> list[str]:
    """Ports of its own and the model of the tests, so that a developer's `make run` may stay up."""
    flags = ["--log-dir", str(tmp_path / "logs"), "--model", str(embedded_model_dir)]
    for name in ("engine", "frontend", "engine-metrics", "frontend-metrics"):
        flags += [f"--{name}-port", str(free_port())]
    return flags


def test_the_demo_answers_and_ends_well(launcher_flags: list[str]) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "launcher", "--demo", *launcher_flags], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "The capital of France is Paris" in demo.stdout


@pytest.fixture
def running(launcher_flags: list[str]) -> Iterator[subprocess.Popen[str]]:
    """`make run`, up to the line that says how to send the next request."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", *launcher_flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        yield process
        process.kill()


def test_run_stays_up_serves_the_command_line_and_ends_with_ctrl_c(
    running: subprocess.Popen[str], launcher_flags: list[str], tmp_path: Path
) -> None:
    assert running.stdout is not None
    shown = ""
    while "grpcurl" not in shown:
        line = running.stdout.readline()
        assert line, shown
        shown += line
    target = f"127.0.0.1:{launcher_flags[launcher_flags.index('--frontend-port') + 1]}"
    assert target in shown

    def stepwire(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([STEPWIRE, *args, "--target", target], capture_output=True, text=True, timeout=TIMEOUT_S)

    plain = stepwire("generate", "The capital of France is", "--max-tokens", "4", "--temperature", "0")
    assert plain.returncode == 0, plain.stderr
    assert "Paris" in plain.stdout

    lines = stepwire("generate", "1 2 3", "--max-tokens", "3", "--ignore-eos", "--json").stdout.splitlines()
    assert json.loads(lines[-1])["finished"]["usage"]["completion_tokens"] == 3

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n")
    answers = stepwire("generate", "--file", str(prompts), "--max-tokens", "3", "--ignore-eos").stdout.splitlines()
    assert len([json.loads(line) for line in answers]) == 3

    refused = stepwire("generate", "hello", "--top-p", "7")
    assert refused.returncode != 0
    assert "top_p" in refused.stderr
    assert "Traceback" not in refused.stderr

    assert "SERVING" in stepwire("health").stdout
    assert "8192" in stepwire("models").stdout
    assert stepwire("tokenize", "hello world").returncode == 0

    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 0, rest
    assert stepwire("health").returncode != 0
