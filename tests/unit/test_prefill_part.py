"""The part of prompts beside decodes, measured with steps whose time is made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_core.model_executor.prefill_part import NUM_DECODES, PARTS, measure_prefill_part


class TimedSteps:
    """Steps that take the time a rule says for the tokens in them, and every so many of them ten times as long."""

    def __init__(self, seconds: Callable[[int], float], disturbed_every: int = 0) -> None:
        self.now = 0.0
        self._seconds = seconds
        self._disturbed_every = disturbed_every
        self._num_steps = 0

    def run(self, query_lens: list[int]) -> None:
        self._num_steps += 1
        is_disturbed = self._disturbed_every and self._num_steps % self._disturbed_every == 0
        self.now += self._seconds(sum(query_lens)) * (10 if is_disturbed else 1)

    def measure(self, max_query_len: int = 8192) -> int:
        return measure_prefill_part(self.run, max_query_len, lambda: self.now)


def test_a_step_with_the_part_takes_little_longer_than_one_without() -> None:
    # 40 ms for any number of rows up to 40, one more for each beyond.
    assert TimedSteps(lambda rows: 0.04 + 0.001 * max(0, rows - 40)).measure() == 48


def test_where_tokens_cost_nothing_the_largest_part_is_taken() -> None:
    assert TimedSteps(lambda rows: 0.01).measure() == PARTS[-1]


def test_where_each_token_counts_the_smallest_part_is_taken() -> None:
    assert TimedSteps(lambda rows: 0.001 * rows).measure() == PARTS[0] > NUM_DECODES


@pytest.mark.parametrize("disturbed_every", [2, 3])
def test_steps_that_something_else_made_longer_do_not_count(disturbed_every: int) -> None:
    steps = TimedSteps(lambda rows: 0.04 + 0.001 * max(0, rows - 40), disturbed_every)
    assert steps.measure() == 48


@pytest.mark.parametrize(("max_query_len", "part"), [(64, 64), (63, 48), (4, 4)])
def test_no_prompt_is_longer_than_the_model_allows(max_query_len: int, part: int) -> None:
    assert TimedSteps(lambda rows: 0.01).measure(max_query_len) == part
