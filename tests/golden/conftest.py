"""Golden files: exact expected text, compared in every run and rewritten with `pytest tests/golden --golden-update`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CheckGolden = Callable[[Path, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-update", action="store_true", help="rewrite golden files; review the diff")


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> CheckGolden:
    """Compare a golden file with what came out now, or rewrite it."""
    # pytest reads options of this file only when tests/golden is on the command line; other runs compare.
    is_update = request.config.getoption("--golden-update", default=False)

    def check(path: Path, actual: str) -> None:
        if is_update:
            path.write_text(actual, encoding="utf-8")
        assert actual == path.read_text(encoding="utf-8"), f"{path.name}: rerun with --golden-update and review"

    return check
