"""`make observe`: Prometheus beside the services of this host, with the project's rules, until Ctrl-C."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from launcher import children, preflight, services, targets
from launcher.children import Child
from launcher.errors import LaunchError
from launcher.preflight import HOST

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yaml"
# It writes its data in three seconds or so.
STOP_TIMEOUT_S = 20.0
READY_TIMEOUT_S = 60.0
INTERRUPTED = 130


def main() -> int:
    """Exit code: 0 after Ctrl-C, 1 when something failed, 2 for a wrong flag."""
    options = _parser().parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    console = Console(highlight=False, soft_wrap=True)
    try:
        observe(options, console)
    except LaunchError as error:
        Console(stderr=True, highlight=False).print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def observe(options: argparse.Namespace, console: Console) -> None:
    """Start Prometheus, say where it is, and stay until a signal."""
    program = find_program()
    preflight.check_ports([("port", options.port)])
    by_hand = targets.announced(targets.DIRECTORY / "by_hand.json", options.frontends, options.engines)
    with by_hand if options.frontends or options.engines else nullcontext():
        child = children.start("prometheus", command(program, options.port, options.data_dir), options.log_dir)
        try:
            _wait_until_ready(child, options.port)
            _print_places(options.port, console)
            _stay(child, console)
        finally:
            problem = child.stop(STOP_TIMEOUT_S)
    if problem:
        raise LaunchError(problem)


def find_program() -> str:
    """Path of Prometheus; raises LaunchError saying how to get it."""
    found = shutil.which("prometheus")
    if found is None:
        raise LaunchError("Prometheus is not installed: apt-get install prometheus, or `make system-deps` as root")
    return found


def command(program: str, port: int, data_dir: Path) -> list[str]:
    """On loopback, with the project's configuration."""
    return [
        program,
        f"--config.file={CONFIG}",
        f"--storage.tsdb.path={data_dir}",
        f"--web.listen-address={HOST}:{port}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]


def _wait_until_ready(child: Child, port: int) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not _is_ready(port):
        child.check_alive()
        if time.monotonic() > deadline:
            raise LaunchError(f"Prometheus is not ready after {READY_TIMEOUT_S:g} s; see {child.log_path}")
        time.sleep(services.POLL_INTERVAL_S)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/-/ready", timeout=1.0):
            return True
    except OSError:
        return False


def _print_places(port: int, console: Console) -> None:
    url = f"http://{HOST}:{port}"
    for name, path in (("Graphs", "graph"), ("Alerts", "alerts"), ("Targets", "targets")):
        console.print(f"{name + ':':9}{url}/{path}", markup=False)
    console.print(f"\nA page with all panels:   .venv/bin/stepwire report --prometheus {url} --last 15m", markup=False)
    console.print("The services live:        .venv/bin/stepwire top", markup=False)
    console.print("Grafana's dashboards:     deploy/grafana/*.json, with this server as data source", markup=False)
    console.print("\nCtrl-C stops Prometheus; its data stays.", style="dim")


def _stay(child: Child, console: Console) -> None:
    try:
        services.watch([child])
    except KeyboardInterrupt:
        console.print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m launcher.observe", description=__doc__)
    add = parser.add_argument
    add("--port", type=int, default=9090, help="where Prometheus listens, on loopback")
    add("--frontends", type=_addresses, default=[], help="metrics ports of frontends that `make run` has not started")
    add("--engines", type=_addresses, default=[], help="the same of engines: host:port, comma separated")
    add("--data-dir", type=Path, default=Path("build/prometheus"), help="where Prometheus keeps its data")
    add("--log-dir", type=Path, default=Path("build/logs"), help="where Prometheus logs")
    return parser


def _addresses(text: str) -> Sequence[str]:
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    if any(":" not in address for address in addresses):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of host:port")
    return addresses


if __name__ == "__main__":
    sys.exit(main())
