"""When a test may be skipped: an outside program is missing, or there is no GPU, or a CPU lacks instructions.

With STEPWIRE_REQUIRE_ALL=1 (CI) any skip but for the hardware is a failure, so that a suite can not vanish unnoticed. A
pytest plugin, loaded by conftest.py.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

NODE_BIN = Path(__file__).parent.parent / "node_modules" / ".bin"


def require_program(*names: str, how: str) -> str:
    """Path of the first of these programs that is installed; skips the test, saying how to get one, if none is."""
    for name in names:
        found = shutil.which(name) or shutil.which(name, path=str(NODE_BIN))
        if found:
            return found
    pytest.skip(f"needs {' or '.join(names)}: {how}")


def skips_are_failures() -> bool:
    """CI's switch."""
    return os.environ.get("STEPWIRE_REQUIRE_ALL") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    # Importing torch takes a second: only runs that select GPU tests pay for it.
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    is_expected_failure = hasattr(report, "wasxfail")
    is_about_hardware = any(item.get_closest_marker(name) for name in ("gpu", "instructions"))
    if report.skipped and not is_expected_failure and not is_about_hardware:
        _fail_if_required(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.skipped:
        _fail_if_required(report)
    return report


def _fail_if_required(report: pytest.TestReport | pytest.CollectReport) -> None:
    if skips_are_failures():
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped under STEPWIRE_REQUIRE_ALL=1: {reason}"
