"""The skip rules: programs, GPUs, and CI's switch that turns a skip into a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

import skips

pytest_plugins = ["pytester"]

SUITE = """
import pytest
from skips import require_program

def test_passes():
    pass

def test_has_the_program():
    assert require_program("no-such-program", "sh", how="install it").endswith("sh")

def test_lacks_the_program():
    require_program("no-such-program", how="install it like this")

@pytest.mark.gpu
def test_needs_a_gpu():
    pytest.skip("no GPU today")

@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    assert False
"""
MODULE_SKIP = "import pytest\npytest.skip('whole module', allow_module_level=True)\n"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(skips.__file__).parent))
    pytester.makepyfile(test_suite=SUITE, test_module=MODULE_SKIP)
    pytester.makeini("[pytest]\nmarkers = gpu\nasyncio_default_fixture_loop_scope = function\n")
    return pytester


def run(suite: pytest.Pytester) -> pytest.RunResult:
    # A process of its own: torch can not be imported twice into this one.
    return suite.runpytest_subprocess("-p", "skips", "-ra", "--continue-on-collection-errors")


def test_a_skip_names_the_program_and_how_to_get_it(suite, monkeypatch):
    monkeypatch.delenv("STEPWIRE_REQUIRE_ALL", raising=False)
    result = run(suite)
    result.assert_outcomes(passed=2, skipped=3, xfailed=1)
    result.stdout.fnmatch_lines(["*needs no-such-program: install it like this*"])


def test_under_require_all_only_gpu_tests_may_skip(suite, monkeypatch):
    monkeypatch.setenv("STEPWIRE_REQUIRE_ALL", "1")
    result = run(suite)
    result.assert_outcomes(passed=2, failed=1, errors=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*skipped under STEPWIRE_REQUIRE_ALL=1: *install it like this*"])
