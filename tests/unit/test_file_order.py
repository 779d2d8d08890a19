"""Long files start first, and the table that says which are long names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import file_order
from file_order import SECONDS, TESTS, place

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("name", SECONDS)
def test_a_long_file_is_there(name: str) -> None:
    assert (TESTS / name).is_file()


def test_long_files_come_first_and_then_those_with_most_tests() -> None:
    longest, shorter = sorted(SECONDS, key=lambda name: -SECONDS[name])[:2]
    files = {"unit/test_few.py": 1, shorter: 9, "unit/test_many.py": 50, longest: 1}
    assert sorted(files, key=lambda name: place(TESTS / name, files[name])) == [
        longest,
        shorter,
        "unit/test_many.py",
        "unit/test_few.py",
    ]


def test_workers_start_the_files_in_that_order_and_the_tests_of_a_file_in_its_own(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        conftest=Path(file_order.__file__).read_text().replace("property/test_scheduler_machine.py", "test_long.py"),
        test_early="def test_b(): pass\ndef test_a(): pass\n",
        test_long="def test_z(): pass\n",
    )
    flags = ("--numprocesses=1", "--dist=loadfile", "--no-loadscope-reorder", "-v")
    result = pytester.runpytest_subprocess(*flags)
    assert re.findall(r"PASSED \S*::(\w+)", result.stdout.str()) == ["test_z", "test_b", "test_a"]
