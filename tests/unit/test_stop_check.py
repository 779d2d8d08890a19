"""The stop check, rule by rule in the order of engine-semantics.md §8."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.scheduler.request import RepetitionDetection, Request, RequestStatus, StopConditions
from engine_core.scheduler.stop_check import check_stop, repeats
from fakes.request_factory import make_request

EOS, STOP_ID, OTHER = 100, 101, 9
STOPPED, LENGTH = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


def request_with(output: list[int], *, num_prompt: int = 5, **stop: object) -> Request:
    fields = {"max_tokens": 10, "eos_token_ids": frozenset({EOS}), "stop_token_ids": frozenset({STOP_ID}), **stop}
    return make_request(1, num_prompt, stop=StopConditions(**fields), output_token_ids=output)


def check(output: list[int], *, max_model_len: int = 100, **stop: object) -> tuple[RequestStatus | None, int | None]:
    request = request_with(output, **stop)
    return check_stop(request, max_model_len), request.stop_token_id


def test_ordinary_token_goes_on() -> None:
    assert check([OTHER]) == (None, None)


def test_eos_stops_without_an_id() -> None:
    assert check([OTHER, EOS]) == (STOPPED, None)


def test_ignored_eos_goes_on() -> None:
    assert check([EOS], ignore_eos=True) == (None, None)


def test_eos_that_is_ignored_but_listed_as_stop_id_stops_with_its_id() -> None:
    assert check([EOS], ignore_eos=True, stop_token_ids=frozenset({EOS})) == (STOPPED, EOS)


def test_stop_id_stops_with_its_id() -> None:
    assert check([OTHER, STOP_ID]) == (STOPPED, STOP_ID)


def test_eos_comes_before_an_equal_stop_id() -> None:
    assert check([EOS], stop_token_ids=frozenset({EOS})) == (STOPPED, None)


def test_only_the_newest_token_counts() -> None:
    assert check([EOS, STOP_ID, OTHER]) == (None, None)


@pytest.mark.parametrize(("num_output", "status"), [(9, None), (10, LENGTH), (11, LENGTH)])
def test_max_tokens(num_output: int, status: RequestStatus | None) -> None:
    assert check([OTHER] * num_output) == (status, None)


@pytest.mark.parametrize(("num_output", "status"), [(2, None), (3, LENGTH), (4, LENGTH)])
def test_max_model_len_counts_prompt_and_output(num_output: int, status: RequestStatus | None) -> None:
    assert check([OTHER] * num_output, max_model_len=8) == (status, None)


def test_stop_comes_before_length() -> None:
    assert check([OTHER] * 9 + [EOS]) == (STOPPED, None)
    assert check([OTHER] * 9 + [STOP_ID]) == (STOPPED, STOP_ID)


@pytest.mark.regression(15)
@pytest.mark.parametrize("token_id", [EOS, STOP_ID])
def test_nothing_stops_below_min_tokens(token_id: int) -> None:
    assert check([OTHER, token_id], min_tokens=3) == (None, None)
    assert check([OTHER, OTHER, token_id], min_tokens=3)[0] is STOPPED


def test_length_is_reached_at_min_tokens() -> None:
    assert check([OTHER] * 10, min_tokens=10) == (LENGTH, None)


REPETITION = RepetitionDetection(max_pattern_tokens=3, min_pattern_tokens=2, min_repeats=3)


def test_repeated_tail_ends_the_request() -> None:
    assert check([7, 1, 2, 1, 2, 1, 2], repetition=REPETITION)[0] is RequestStatus.FINISHED_REPETITION


def test_length_comes_before_repetition() -> None:
    assert check([1, 2, 1, 2, 1, 2], repetition=REPETITION, max_tokens=6)[0] is LENGTH


def test_repetition_is_not_looked_for_below_min_tokens() -> None:
    assert check([1, 2, 1, 2, 1, 2], repetition=REPETITION, min_tokens=7) == (None, None)


@pytest.mark.parametrize(
    ("output", "is_repetition"),
    [
        ([], False),
        ([1, 2, 1, 2], False),
        ([1, 2, 1, 2, 1, 2], True),
        ([1, 2, 3] * 3, True),
        # A pattern of four tokens is longer than asked for.
        ([1, 2, 3, 4] * 3, False),
        # A repetition that is over is none.
        ([1, 2, 1, 2, 1, 2, 9], False),
        ([1, 2, 9, 2, 1, 2], False),
        # One token six times is a pattern of two, three times.
        ([5] * 6, True),
        ([5] * 5, False),
    ],
)
def test_repetition(output: list[int], is_repetition: bool) -> None:
    assert repeats(output, REPETITION) == is_repetition


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    output=st.lists(st.integers(0, 1), max_size=14),
    bounds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    min_repeats=st.integers(2, 4),
)
def test_repetition_equals_comparison_by_copying(output: list[int], bounds: tuple[int, int], min_repeats: int) -> None:
    shortest, longest = sorted(bounds)
    expected = any(
        len(output) >= length * min_repeats
        and output[-length * min_repeats :] == output[len(output) - length :] * min_repeats
        for length in range(shortest, longest + 1)
    )
    assert repeats(output, RepetitionDetection(longest, shortest, min_repeats)) == expected
