"""Permits: never more than the limits, everything given back, and no promise that cannot be kept."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.admission import Admission
from stepwire.errors import InvalidRequestError, OverloadedError


def test_one_more_than_the_limit_is_refused_until_one_goes():
    admission = Admission(2, 100)
    first, _second = admission.enter(), admission.enter()
    with pytest.raises(OverloadedError, match="limit of 2") as caught:
        admission.enter()
    assert caught.value.retry_after_ms > 0
    first.release()
    admission.enter()


def test_n_counts_n():
    admission = Admission(4, 1000)
    permit = admission.enter()
    permit.grow(3, 10)
    assert (admission.num_requests, admission.num_prompt_tokens) == (3, 30)
    admission.enter()
    with pytest.raises(OverloadedError):
        admission.enter()


def test_prompt_tokens_are_limited_too():
    admission = Admission(10, 100)
    admission.enter().grow(1, 80)
    late = admission.enter()
    with pytest.raises(OverloadedError, match="limit of 100"):
        late.grow(1, 21)
    late.grow(1, 20)


def test_what_can_never_fit_is_the_callers_fault():
    permit = Admission(4, 100).enter()
    with pytest.raises(InvalidRequestError, match=r"sampling\.n"):
        permit.grow(5, 1)
    with pytest.raises(InvalidRequestError, match=r"sampling\.n"):
        permit.grow(2, 51)
    with pytest.raises(InvalidRequestError) as caught:
        permit.grow(1, 101)
    assert [violation.field for violation in caught.value.violations] == ["prompt"]


def test_release_twice_gives_back_once():
    admission = Admission(4, 100)
    permit = admission.enter()
    permit.grow(2, 5)
    permit.release()
    permit.release()
    assert (admission.num_requests, admission.num_prompt_tokens) == (0, 0)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 60), st.booleans())))
def test_counters_stay_within_limits_and_end_at_zero(requests: list[tuple[int, int, bool]]):
    admission = Admission(8, 200)
    permits = []
    for num_choices, num_tokens, leaves in requests:
        with contextlib.suppress(OverloadedError):
            permits.append(admission.enter())
        if permits:
            with contextlib.suppress(OverloadedError, InvalidRequestError):
                permits[-1].grow(max(num_choices, permits[-1].num_requests), num_tokens)
        assert 0 <= admission.num_requests <= 8
        assert admission.num_prompt_tokens <= 200
        if leaves and permits:
            permits.pop(0).release()
    for permit in permits:
        permit.release()
    assert (admission.num_requests, admission.num_prompt_tokens) == (0, 0)
