"""How long the fuzzers go on: a short form with the same seeds each time, or `--fuzz-seconds` with new ones.

A plugin of pytest. Tests marked `fuzz` share the seconds evenly.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds", type=float, help="How long all fuzzers together look for faults, with new seeds."
    )
    parser.addoption("--fuzz-seed", type=int, help="Repeat what this seed did: it is printed when a fuzzer fails.")


class Fuzzing:
    """`seconds` None: the short form."""

    def __init__(self, seconds: float | None, seed: int | None) -> None:
        self.seconds = seconds
        self._seed = seed

    def seeds(self, num_rounds: int = 1) -> Iterator[int]:
        """A seed for each round: the first numbers, or random ones until the time is over."""
        if self._seed is not None:
            yield self._seed
            return
        end = time.monotonic() + (self.seconds or 0)
        number = 0
        while number < num_rounds or time.monotonic() < end:
            seed = number if self.seconds is None else random.SystemRandom().randrange(2**32)
            # Captured, and shown when the test fails.
            sys.stdout.write(f"round {number} with --fuzz-seed={seed}\n")
            yield seed
            number += 1


@pytest.fixture
def fuzzing(request: pytest.FixtureRequest) -> Fuzzing:
    seconds = request.config.getoption("--fuzz-seconds")
    num_fuzzers = sum(item.get_closest_marker("fuzz") is not None for item in request.session.items)
    return Fuzzing(seconds and seconds / num_fuzzers, request.config.getoption("--fuzz-seed"))
