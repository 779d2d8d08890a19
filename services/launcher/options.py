"""Command line of `python -m launcher`. Pure.

Flags the launcher does not know belong to the engine core; those after `--` belong to the frontend.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = "Start an engine core and a frontend on loopback, stream one sample answer, and stay up."
EPILOG = (
    "Further flags, such as --model, go to the engine core (see python -m engine_core --help); "
    "those after -- go to the frontend (see python -m frontend --help)."
)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What to start and where."""

    engine_port: int
    frontend_port: int
    engine_metrics_port: int
    frontend_metrics_port: int
    prompt: str
    is_demo: bool
    log_dir: Path
    ready_timeout_s: float
    engine_flags: tuple[str, ...]
    frontend_flags: tuple[str, ...]

    def ports(self) -> dict[str, int]:
        """Flag name -> port, of every port that must be free."""
        return {
            "engine-port": self.engine_port,
            "frontend-port": self.frontend_port,
            "engine-metrics-port": self.engine_metrics_port,
            "frontend-metrics-port": self.frontend_metrics_port,
        }


def parse(arguments: Sequence[str]) -> LaunchOptions:
    """Options from the command line; a mistake ends the process with 2."""
    own, frontend_flags = _split_at_dashes(list(arguments))
    values, engine_flags = _parser().parse_known_args(own)
    return LaunchOptions(
        engine_port=values.engine_port,
        frontend_port=values.frontend_port,
        engine_metrics_port=values.engine_metrics_port,
        frontend_metrics_port=values.frontend_metrics_port,
        prompt=values.prompt,
        is_demo=values.demo,
        log_dir=values.log_dir,
        ready_timeout_s=values.ready_timeout_s,
        engine_flags=tuple(engine_flags),
        frontend_flags=tuple(frontend_flags),
    )


def _split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    position = arguments.index("--")
    return arguments[:position], arguments[position + 1 :]


def _parser() -> argparse.ArgumentParser:
    # No abbreviations: an engine flag like --max must never be taken for one of these.
    parser = argparse.ArgumentParser("python -m launcher", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    add = parser.add_argument
    add("--demo", action="store_true", help="end after the sample answer")
    add("--prompt", default="The capital of France is", help="prompt of the sample answer")
    add("--engine-port", type=int, default=50061)
    add("--frontend-port", type=int, default=50051)
    add("--engine-metrics-port", type=int, default=9101)
    add("--frontend-metrics-port", type=int, default=9100)
    add("--log-dir", type=Path, default=Path("build/logs"), help="where both services log")
    add("--ready-timeout-s", type=float, default=600.0, help="longest wait for the model to load")
    return parser
