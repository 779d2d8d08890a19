"""The services: their command lines, the order in which they start, become ready and stop, and who revives engines."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
# An engine that ends sooner has a fault that another start would not heal.
MIN_LIFE_S = 5.0


def prepare_model(options: LaunchOptions) -> None:
    """Download and convert the model once; a process of its own, so that nothing of it stays in memory."""
    code = subprocess.call(_module("engine_core.model_executor.prepare_model", *options.engine_flags))
    if code < 0:
        raise LaunchError(f"preparing the model was ended by signal {-code}")
    if code > 0:
        # The child has already said in one sentence what is wrong.
        raise SystemExit(code)


def engine_command(options: LaunchOptions, number: int) -> list[str]:
    """Engine core `number`, from 0, on loopback."""
    port, metrics_port = options.engine_ports[number], options.engine_metrics_ports[number]
    return [
        *_module("engine_core", *options.engine_flags, "--owner", "parent"),
        *("--host", HOST, "--port", str(port), "--metrics-port", str(metrics_port)),
    ]


def frontend_command(options: LaunchOptions) -> list[str]:
    """The frontend on loopback, attached to these engines."""
    return [
        *_module("frontend", *options.frontend_flags, "--owner", "parent"),
        *("--engine-endpoints", ",".join(f"{HOST}:{port}" for port in options.engine_ports)),
        *("--host", HOST, "--port", str(options.frontend_port), "--metrics-port", str(options.frontend_metrics_port)),
        *("--http-port", str(options.frontend_http_port)),
        *("--admin-host", HOST, "--admin-port", str(options.frontend_admin_port)),
    ]


def start_all(options: LaunchOptions, started: list[Child], variables: Mapping[str, str]) -> None:
    """Start all, the frontend last; each is in `started` as soon as it runs, so that a failure in between stops it.

    `variables` are added to the environment of all.
    """
    environment = settings.environment_with(variables)
    started.extend(_start_engine(options, number, environment) for number in range(options.num_engines))
    # Variables STEPWIRE_* configure the engine, whose settings are the many; the frontend would refuse them.
    environment = {**settings.environment_without_settings(), **variables}
    started.append(children.start("frontend", frontend_command(options), options.log_dir, environment))


def _start_engine(
    options: LaunchOptions, number: int, environment: Mapping[str, str] | None = None, *, keep_log: bool = False
) -> Child:
    name = f"engine core {number}" if options.num_engines > 1 else "engine core"
    return children.start(name, engine_command(options, number), options.log_dir, environment, keep_log=keep_log)


def observed(options: LaunchOptions) -> AbstractContextManager[None]:
    """For the body, a Prometheus of `make observe` scrapes all."""
    return targets.announced(
        options.log_dir / "targets" / f"{options.frontend_metrics_port}.json",
        [f"{HOST}:{options.frontend_metrics_port}"],
        [f"{HOST}:{port}" for port in options.engine_metrics_ports],
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


def watch(started: list[Child], successor: Callable[[int], Child | None] = lambda _: None) -> None:
    """Stay until a service ends by itself, which is an error, or a signal raises KeyboardInterrupt.

    `successor` is asked about the place in `started` of one that has ended: what it returns stands there from now on.
    """
    while True:
        for place, child in enumerate(started):
            if child.exit_code is None:
                continue
            heir = successor(place)
            if heir is None:
                child.check_alive()
            else:
                child.close()
                started[place] = heir
        time.sleep(POLL_INTERVAL_S)


def revived_engine(
    options: LaunchOptions, started: Sequence[Child], place: int, tell: Callable[[str], None]
) -> Child | None:
    """One of several engines, started again: the others serve meanwhile. None where that would not help."""
    child = started[place]
    if options.num_engines == 1 or place >= options.num_engines or child.age_s < MIN_LIFE_S:
        return None
    tell(f"{child.name} has ended with code {child.exit_code}; starting it again")
    return _start_engine(options, place, keep_log=True)


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
