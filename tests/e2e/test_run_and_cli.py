"""What a newcomer does: the demo, the running stack, the command line, Ctrl-C. Real services, real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from free_ports import free_port
from launcher.options import METRICS_PORT_STEP

pytestmark = pytest.mark.slow

TIMEOUT_S = 120
STEPWIRE = Path(sys.executable).parent / "stepwire"


@pytest.fixture
def launcher_flags(embedded_model_dir: Path, tmp_path: Path) -> list[str]:
    """Ports of its own and the model of the tests, so that a developer's `make run` may stay up."""
    flags = ["--log-dir", str(tmp_path / "logs"), "--model", str(embedded_model_dir)]
    for name in ("engine", "frontend", "frontend-http", "frontend-admin", "engine-metrics", "frontend-metrics"):
        # A second engine has its ports above those of the first.
        flags += [f"--{name}-port", str(free_port(1, METRICS_PORT_STEP))]
    return flags


def test_the_demo_answers_and_ends_well(launcher_flags: list[str]) -> None:
    demo = subprocess.run(
        [sys.executable, "-m", "launcher", "--demo", *launcher_flags], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "The capital of France is Paris" in demo.stdout


@pytest.fixture
def running(request: pytest.FixtureRequest, launcher_flags: list[str]) -> Iterator[subprocess.Popen[str]]:
    """`make run`, with the flags of the test if it gives any."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", *launcher_flags, *getattr(request, "param", ())],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("running", [("--engines", "2")], indirect=True)
def test_an_answer_goes_on_when_its_engine_is_killed(running: subprocess.Popen[str], launcher_flags: list[str]) -> None:
    read_until(running, "grpcurl")
    command = [STEPWIRE, "generate", "Count to a hundred: one, two,", "--max-tokens", "300", "--ignore-eos"]
    command += ["--temperature", "0", "--target", f"127.0.0.1:{port_of(launcher_flags, 'frontend')}"]
    undisturbed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert undisturbed.returncode == 0, undisturbed.stderr

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as answering:
        assert answering.stdout is not None
        assert answering.stderr is not None
        answer = answering.stdout.read(1)
        serving_engine(running.pid, port_of(launcher_flags, "engine-metrics")).kill()
        answer += answering.stdout.read()
        said = answering.stderr.read()
    assert answering.returncode == 0, said
    assert answer == undisturbed.stdout
    # More than once where the other engine is not there yet.
    assert re.search(r"broke off( \d+ times)? and went on", said)
    read_until(running, "starting it again")


def serving_engine(launcher_pid: int, first_metrics_port: int) -> psutil.Process:
    """The engine of the launcher that has a running request."""
    engines = {
        int(process.cmdline()[process.cmdline().index("--metrics-port") + 1]): process
        for process in psutil.Process(launcher_pid).children()
        if "engine_core" in process.cmdline()
    }
    assert sorted(engines) == [first_metrics_port, first_metrics_port + METRICS_PORT_STEP]
    return engines[serving_port(list(engines))]


def serving_port(metrics_ports: list[int]) -> int:
    """The one behind which a request runs: an engine publishes after its step, when the first token is on its way."""
    give_up, pause = time.monotonic() + 10, threading.Event()
    while True:
        running = {port: num_running(port) for port in metrics_ports}
        serving = [port for port, number in running.items() if number]
        if len(serving) == 1:
            return serving[0]
        assert time.monotonic() < give_up, f"requests by metrics port: {running}"
        pause.wait(0.01)


def num_running(metrics_port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
        (value,) = re.findall(
            r"^stepwire_engine_core_requests_running\{.*\} (.*)$", answer.read().decode(), re.MULTILINE
        )
    return float(value)


def port_of(launcher_flags: list[str], name: str) -> int:
    return int(launcher_flags[launcher_flags.index(f"--{name}-port") + 1])


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    shown = ""
    while text not in shown:
        line = process.stdout.readline()
        assert line, shown
        shown += line
    return shown


def test_run_stays_up_serves_the_command_line_and_ends_with_ctrl_c(
    running: subprocess.Popen[str], launcher_flags: list[str], tmp_path: Path
) -> None:
    shown = read_until(running, "grpcurl")
    target = f"127.0.0.1:{port_of(launcher_flags, 'frontend')}"
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
