"""`make observe`: a real Prometheus scrapes what was announced, and ends with its launcher."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from free_ports import free_port
from launcher import targets
from skips import require_program
from stepwire.metrics import serve_http
from stepwire_client.monitor.prometheus import Prometheus, Span

ROOT = Path(__file__).parent.parent.parent
HOW = "apt-get install prometheus (make system-deps)"


@pytest.fixture
def engine_metrics():
    registry = CollectorRegistry()
    Gauge("stepwire_engine_core_requests_running", "", registry=registry).set(7)
    port, close = serve_http(0, registry, lambda: True, lambda: True)
    yield f"127.0.0.1:{port}"
    close()


def observe(tmp_path: Path, *flags: str, path: str | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.observe", "--data-dir", str(tmp_path), "--log-dir", str(tmp_path), *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PATH": path or os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_what_is_announced_is_scraped_until_ctrl_c(tmp_path, engine_metrics):
    require_program("prometheus", how=HOW)
    port = free_port()
    with observe(tmp_path, "--port", str(port), "--engines", engine_metrics) as running:
        assert running.stdout is not None
        while f"127.0.0.1:{port}/targets" not in (line := running.stdout.readline()):
            assert line, "it has ended"
        server = Prometheus(f"http://127.0.0.1:{port}")
        while server.value("max(stepwire_engine_core_requests_running)", time.time()) != 7:
            assert running.poll() is None
        assert server.value('max(up{job="stepwire-engine-core"})', time.time()) == 1
        assert server.scrape_interval_s() == 5
        assert server.range("up", Span(0, 60, 60)) == []
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0


def test_a_port_in_use_is_named(tmp_path):
    require_program("prometheus", how=HOW)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with observe(tmp_path, "--port", str(listener.getsockname()[1])) as refused:
            output, _ = refused.communicate(timeout=30)
    assert refused.returncode == 1
    assert "is in use" in output


def test_without_prometheus_it_says_what_to_install(tmp_path):
    with observe(tmp_path, path=str(tmp_path)) as refused:
        output, _ = refused.communicate(timeout=30)
    assert refused.returncode == 1
    assert "apt-get install prometheus" in output


def test_targets_are_there_while_services_run_and_not_afterwards(tmp_path):
    path = tmp_path / "targets" / "9100.json"
    with targets.announced(path, ["127.0.0.1:9100"], []):
        assert json.loads(path.read_text()) == [{"targets": ["127.0.0.1:9100"], "labels": {"job": "stepwire-frontend"}}]
    assert list(path.parent.iterdir()) == []
