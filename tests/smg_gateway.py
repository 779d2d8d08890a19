"""The smg gateway as a process in front of a frontend: a client of VllmEngine that nobody here wrote."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from free_ports import free_port
from skips import require_program

BIN = Path(__file__).parent.parent / ".venv-smg" / "bin"
READY_WITHIN_S = 60.0
HOW = "python3 -m venv .venv-smg && .venv-smg/bin/pip install smg==1.13.0"


def gateway_program() -> str:
    """Skips the test where the gateway is not installed."""
    own = BIN / "smg"
    return str(own) if own.is_file() else require_program("smg", how=HOW)


@contextmanager
def running_gateway(
    frontend_port: int, model_dir: Path, log: Path, *, policy: str = "round_robin", log_level: str = "warn"
) -> Iterator[str]:
    """The base URL of its OpenAI-compatible API, once it is ready."""
    port = free_port()
    command = [
        *(gateway_program(), "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", f"grpc://127.0.0.1:{frontend_port}", "--backend", "vllm"),
        *("--tokenizer-path", str(model_dir), "--policy", policy),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        *("--health-check-interval-secs", "2", "--worker-startup-check-interval", "1", "--log-level", log_level),
        *("--disable-retries", "--disable-circuit-breaker"),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/readiness", log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < give_up and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    raise AssertionError(f"the gateway is not ready: {log.read_text(errors='replace')[-4000:]}")
