"""Every scenario of tests/golden/scheduler, line by line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from golden.scheduler_scenario import run_scenario

SCENARIOS = sorted((Path(__file__).parent / "scheduler").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, check_golden: Callable[[Path, str], None]) -> None:
    check_golden(path, run_scenario(path.read_text(encoding="utf-8")))


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 10


def test_changed_output_is_noticed() -> None:
    """The runner replaces what a file claims, so a wrong claim cannot stay."""
    text = "config num_blocks=9\nadd a prompt=4 max=1\n  -> a: this is not what happens\n"
    assert run_scenario(text) == "config num_blocks=9\nadd a prompt=4 max=1\n  -> a: [QUEUED]\n"
