"""The two services: their command lines, the order in which they start, become ready and stop."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import grpc

from launcher import children, targets
from launcher.children import Child
from launcher.errors import LaunchError
from launcher.options import LaunchOptions
from launcher.preflight import HOST
from stepwire import settings
from stepwire_client import CallError, Client

POLL_INTERVAL_S = 0.1


def prepare_model(options: LaunchOptions) -> None:
    """Download and convert the model once; a process of its own, so that nothing of it stays in memory."""
    code = subprocess.call(_module("engine_core.model_executor.prepare_model", *options.engine_flags))
    if code < 0:
        raise LaunchError(f"preparing the model was ended by signal {-code}")
    if code > 0:
        # The child has already said in one sentence what is wrong.
        raise SystemExit(code)


def engine_command(options: LaunchOptions) -> list[str]:
    """The engine core on loopback."""
    return [
        *_module("engine_core", *options.engine_flags, "--owner", "parent"),
        *("--host", HOST, "--port", str(options.engine_port), "--metrics-port", str(options.engine_metrics_port)),
    ]


def frontend_command(options: LaunchOptions) -> list[str]:
    """The frontend on loopback, attached to that engine."""
    return [
        *_module("frontend", *options.frontend_flags, "--owner", "parent"),
        *("--engine-endpoints", f"{HOST}:{options.engine_port}"),
        *("--host", HOST, "--port", str(options.frontend_port), "--metrics-port", str(options.frontend_metrics_port)),
        *("--http-port", str(options.frontend_http_port)),
        *("--admin-host", HOST, "--admin-port", str(options.frontend_admin_port)),
    ]


def start_all(options: LaunchOptions, started: list[Child], variables: Mapping[str, str]) -> None:
    """Start both; each is in `started` as soon as it runs, so that a failure in between stops it too.

    `variables` are added to the environment of both.
    """
    environment = settings.environment_with(variables)
    started.append(children.start("engine core", engine_command(options), options.log_dir, environment))
    # Variables STEPWIRE_* configure the engine, whose settings are the many; the frontend would refuse them.
    environment = {**settings.environment_without_settings(), **variables}
    started.append(children.start("frontend", frontend_command(options), options.log_dir, environment))


def observed(options: LaunchOptions) -> AbstractContextManager[None]:
    """For the body, a Prometheus of `make observe` scrapes both."""
    return targets.announced(
        options.log_dir / "targets" / f"{options.frontend_metrics_port}.json",
        [f"{HOST}:{options.frontend_metrics_port}"],
        [f"{HOST}:{options.engine_metrics_port}"],
    )


def wait_until_serving(client: Client, started: Sequence[Child], timeout_s: float) -> None:
    """Return when the frontend answers requests; raise as soon as a service ends or the time is up."""
    deadline = time.monotonic() + timeout_s
    while not _is_serving(client):
        for child in started:
            child.check_alive()
        if time.monotonic() > deadline:
            logs = ", ".join(str(child.log_path) for child in started)
            raise LaunchError(f"not ready after {timeout_s:g} s; see {logs}")
        time.sleep(POLL_INTERVAL_S)


def watch(started: Sequence[Child]) -> None:
    """Stay until a service ends by itself, which is an error, or a signal raises KeyboardInterrupt."""
    while True:
        for child in started:
            child.check_alive()
        time.sleep(POLL_INTERVAL_S)


def stop_all(started: Sequence[Child], timeout_s: float) -> list[str]:
    """Drain and stop, the frontend first so that its clients get their answers; returns what went wrong."""
    try:
        return [problem for child in reversed(started) if (problem := child.stop(timeout_s))]
    except KeyboardInterrupt:
        # A second signal: the user does not want to wait for the drain.
        for child in started:
            child.kill()
        raise


def _is_serving(client: Client) -> bool:
    try:
        return client.health(timeout_s=1.0)
    except CallError as error:
        if error.code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
            return False
        raise


def _module(name: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", name, *flags]
