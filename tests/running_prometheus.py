"""A real Prometheus (Debian's) that scrapes services of a test every second, with rules as they are or in a hurry."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from free_ports import free_port
from stepwire_client.monitor.prometheus import Prometheus

RULES = Path(__file__).parent.parent / "deploy" / "prometheus" / "rules.yaml"
HOW = "apt-get install prometheus (make system-deps)"
POLL_S = 0.2
TIMEOUT_S = 60.0

_CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: stepwire
    file_sd_configs: [{{files: [{targets}], refresh_interval: 1s}}]
"""
# Of a rule in a hurry: windows in minutes become seconds, waits for minutes a second.
_WINDOWS = {"2m": "8s", "5m": "8s", "10m": "60s", "30m": "12s", "1h": "12s", "6h": "12s"}


class RunningPrometheus(Prometheus):
    """Answers questions, and takes targets at any time."""

    def __init__(self, url: str, targets: Path) -> None:
        super().__init__(url)
        self.url = url
        self._targets = targets

    def scrape(self, frontend_ports: Sequence[int], engine_ports: Sequence[int]) -> None:
        """These metrics ports from now on, instead of those before."""
        groups = [("stepwire-frontend", frontend_ports), ("stepwire-engine-core", engine_ports)]
        content = [
            {"targets": [f"127.0.0.1:{port}" for port in ports], "labels": {"job": job}} for job, ports in groups
        ]
        draft = self._targets.with_suffix(".tmp")
        draft.write_text(json.dumps(content))
        draft.replace(self._targets)

    def vector(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of every series that the expression gives now."""
        found = self._get("query", query=expr, time=str(time.time()))["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def alerts(self, since: datetime) -> list[dict[str, str]]:
        """Labels and annotations of the alerts that fire now, and whose reason is not older."""
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=TIMEOUT_S) as response:
            found = json.load(response)["data"]["alerts"]
        return [
            {**alert["labels"], **alert["annotations"]}
            for alert in found
            # To the second: it has more digits than Python reads.
            if alert["state"] == "firing" and datetime.fromisoformat(alert["activeAt"][:19] + "+00:00") >= since
        ]


def hurried_rules() -> str:
    """The rules with all times shortened; what they look at and the other limits stay as they are."""
    text = RULES.read_text(encoding="utf-8")
    text = re.sub(r"\[(\w+)\]", lambda found: f"[{_WINDOWS[found[1]]}]", text)
    text = re.sub(r"for: \w+", "for: 1s", text)
    return text.replace("_seconds) > 30", "_seconds) > 1").replace("4 * 3600", "60")


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Ask again until it holds; fails the test with `what` after the time."""
    tick = threading.Event()
    for _ in range(int(timeout_s / POLL_S)):
        if holds():
            return
        tick.wait(POLL_S)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


@contextmanager
def running_prometheus(program: str, directory: Path, rules: str) -> Iterator[RunningPrometheus]:
    port, targets = free_port(), directory / "targets.json"
    (directory / "rules.yaml").write_text(rules)
    config = directory / "prometheus.yaml"
    config.write_text(_CONFIG.format(rules=directory / "rules.yaml", targets=targets))
    server = RunningPrometheus(f"http://127.0.0.1:{port}", targets)
    server.scrape([], [])
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: _is_ready(server.url, process), f"Prometheus is ready, see {directory / 'prometheus.log'}")
        yield server
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "Prometheus has ended"
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=1.0):
            return True
    except OSError:
        return False
