"""Thousands of clients that go away: each request ends once, nothing of it stays, and the others never notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.cancel_storm import CancelStorm
from fakes.cancel_visits import ENDS
from fuzzed_stack import fuzzed_stack
from fuzzing import Fuzzing

NUM_REQUESTS = 2000


@pytest.mark.fuzz
@pytest.mark.slow
async def test_requests_cancelled_at_any_await_in_any_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fuzzing: Fuzzing
) -> None:
    async with fuzzed_stack(tmp_path, caplog) as stack:
        for seed in fuzzing.seeds():
            storm = CancelStorm(stack, seed)
            await storm.blow(NUM_REQUESTS)
            await stack.check_unharmed()
            assert stack.num_finished_choices() == stack.num_submitted_choices()
            # Most were at work then, and did not get to their end.
            assert stack.engine.metric(r"requests_aborted_total\{.*client_cancelled.*\}") > NUM_REQUESTS / 20
            assert {end for end, _ in storm.ends} == set(ENDS)
            # Who stays gets an answer.
            assert {result for end, result in storm.ends if end == "none"} == {"OK", "200"}
