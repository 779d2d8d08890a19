"""Command line of `python -m launcher`. Pure.

Flags the launcher does not know belong to the engine core; those after `--` belong to the frontend.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

DESCRIPTION = "Start engine cores and a frontend on loopback, stream one sample answer, and stay up."
EPILOG = (
    "Further flags, such as --model, go to the engine core (see python -m engine_core --help); "
    "those after -- go to the frontend (see python -m frontend --help)."
)

# Flags of the services that the launcher sets itself, and what to do instead of giving them.
PLACED = {
    "--host": "both services listen on 127.0.0.1; start them by hand for another address",
    "--port": "the flags here are --frontend-port and --engine-port",
    "--http-port": "the flag here is --frontend-http-port",
    "--metrics-port": "the flags here are --frontend-metrics-port and --engine-metrics-port",
    "--engine-endpoints": "the frontend gets the engine cores started with it, the first at --engine-port",
    "--owner": "the launcher owns both services",
    "--check-config": "it ends a service; use python -m engine_core or python -m frontend",
}
# Metrics ports of frontends and engines alternate: the next engine's is not the one after (docs of the ports).
METRICS_PORT_STEP = 10
# What a service takes to end beside its drain: last frames, the device, a server's grace.
STOP_MARGIN_S = 30.0


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What to start and where."""

    num_engines: int
    # Of the first engine; the others follow.
    engine_port: int
    frontend_port: int
    frontend_http_port: int
    frontend_admin_port: int
    engine_metrics_port: int
    frontend_metrics_port: int
    prompt: str
    is_demo: bool
    log_dir: Path
    ready_timeout_s: float
    # Longer than any drain the flags ask for.
    stop_timeout_s: float
    engine_flags: tuple[str, ...]
    frontend_flags: tuple[str, ...]

    @property
    def engine_ports(self) -> list[int]:
        return [self.engine_port + number for number in range(self.num_engines)]

    @property
    def engine_metrics_ports(self) -> list[int]:
        return [self.engine_metrics_port + METRICS_PORT_STEP * number for number in range(self.num_engines)]

    def ports(self) -> list[tuple[str, int]]:
        """(flag that moves it, port) of every port that must be free."""
        return [
            *(("engine-port", port) for port in self.engine_ports),
            ("frontend-port", self.frontend_port),
            ("frontend-http-port", self.frontend_http_port),
            ("frontend-admin-port", self.frontend_admin_port),
            *(("engine-metrics-port", port) for port in self.engine_metrics_ports),
            ("frontend-metrics-port", self.frontend_metrics_port),
        ]


def parse(arguments: Sequence[str]) -> LaunchOptions:
    """Options from the command line; a mistake ends the process with 2."""
    own, frontend_flags = _split_at_dashes(list(arguments))
    parser = _parser()
    values, engine_flags = parser.parse_known_args(own)
    for flag in [*engine_flags, *frontend_flags]:
        name = flag.partition("=")[0]
        if name in PLACED:
            parser.error(f"{name} is set by the launcher: {PLACED[name]}")
    if values.engines < 1:
        parser.error(f"--engines: {values.engines} is below 1")
    return LaunchOptions(
        num_engines=values.engines,
        engine_port=values.engine_port,
        frontend_port=values.frontend_port,
        frontend_http_port=values.frontend_http_port,
        frontend_admin_port=values.frontend_admin_port,
        engine_metrics_port=values.engine_metrics_port,
        frontend_metrics_port=values.frontend_metrics_port,
        prompt=values.prompt,
        is_demo=values.demo,
        log_dir=values.log_dir,
        ready_timeout_s=values.ready_timeout_s,
        stop_timeout_s=max(_drain_s(engine_flags), _drain_s(frontend_flags)) + STOP_MARGIN_S,
        engine_flags=tuple(engine_flags),
        frontend_flags=tuple(frontend_flags),
    )


def _split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    position = arguments.index("--")
    return arguments[:position], arguments[position + 1 :]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence; the usage above it would hide it."""
        self.exit(2, f"error: {message}; see python -m launcher --help\n")


def _drain_s(flags: Sequence[str]) -> float:
    """How long a service with these flags may drain; the defaults are those of the services."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--drain-timeout-s", type=float, default=30.0)
    parser.add_argument("--pre-stop-delay-s", type=float, default=0.0)
    values, _ = parser.parse_known_args(flags)
    return float(values.drain_timeout_s + values.pre_stop_delay_s)


def _parser() -> argparse.ArgumentParser:
    # No abbreviations: an engine flag like --max must never be taken for one of these.
    parser = _Parser("python -m launcher", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    add = parser.add_argument
    add("--demo", action="store_true", help="end after the sample answer")
    add("--prompt", default="The capital of France is", help="prompt of the sample answer")
    add("--engines", type=int, default=1, help="engine cores; with several, one that dies is started again")
    add("--engine-port", type=int, default=50061, help="of the first engine core; each further one is 1 higher")
    add("--frontend-port", type=int, default=50051)
    add("--frontend-http-port", type=int, default=8000, help="OpenAI-compatible HTTP; 0 = off")
    add("--frontend-admin-port", type=int, default=50052)
    add("--engine-metrics-port", type=int, default=9101, help="of the first; each further one is 10 higher")
    add("--frontend-metrics-port", type=int, default=9100)
    add("--log-dir", type=Path, default=Path("build/logs"), help="where the services log")
    add("--ready-timeout-s", type=float, default=600.0, help="longest wait for the model to load")
    return parser
