"""Every scenario of tests/golden/text, line by line: what the caller sees of what the engine sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from golden.text_scenario import run_scenario

SCENARIOS = sorted((Path(__file__).parent / "text").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, check_golden: Callable[[Path, str], None]) -> None:
    check_golden(path, run_scenario(path.read_text(encoding="utf-8")))


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 7


def test_changed_output_is_noticed() -> None:
    """The runner replaces what a file claims, so a wrong claim cannot stay."""
    assert run_scenario('out "a"\n  -> something else\n') == "out \"a\"\n  -> 'a' ids 1\n"
