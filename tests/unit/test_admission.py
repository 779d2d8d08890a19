"""Permits: never more than the limits, everything given back, and no promise that cannot be kept."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.access.caller import Caller, GrantUse
from frontend.access.token_file import Grant
from frontend.admission import Admission
from stepwire.errors import InvalidRequestError, OverloadedError

A, B, C = Caller("a", "a"), Caller("b", "b"), Caller("c", "c")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(admission: Admission, caller: Caller) -> list:
    """As many permits as the caller gets."""
    permits = []
    with contextlib.suppress(OverloadedError):
        while True:
            permits.append(admission.enter(caller))
    return permits


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


@pytest.mark.parametrize(
    ("num_requests", "num_choices", "field"), [(9, 1, "prompt"), (3, 3, "prompt"), (2, 9, "sampling.n")]
)
def test_a_batch_that_can_never_run_is_the_callers_fault(num_requests: int, num_choices: int, field: str):
    admission = Admission(8, 100)
    with pytest.raises(InvalidRequestError) as caught:
        admission.check_batch(A, "prompt", num_requests, num_choices)
    assert [violation.field for violation in caught.value.violations] == [field]
    admission.check_batch(A, "prompt", 4, 2)


@pytest.mark.parametrize("grant", [Grant("few", b"", share=0.5), Grant("few", b"", requests_per_minute=4)])
def test_a_batch_beyond_what_its_token_ever_has_is_the_callers_fault(grant: Grant):
    caller, admission = Caller("few", "", GrantUse(grant, Clock())), Admission(8, 100)
    admission.check_batch(caller, "inputs", 4, 1)
    with pytest.raises(InvalidRequestError, match=r"inputs: 5 .* more than the 4"):
        admission.check_batch(caller, "inputs", 5, 1)
    assert len(fill(admission, caller)) >= 4


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
                permits[-1].grow(max(num_choices, permits[-1].held.num_requests), num_tokens)
        assert 0 <= admission.num_requests <= 8
        assert admission.num_prompt_tokens <= 200
        if leaves and permits:
            permits.pop(0).release()
    for permit in permits:
        permit.release()
    assert (admission.num_requests, admission.num_prompt_tokens) == (0, 0)


def test_a_class_alone_has_all_of_the_limits():
    assert len(fill(Admission(80, 1000), A)) == 80


def test_who_floods_leaves_room_for_a_class_that_is_known():
    admission = Admission(80, 1000)
    admission.name_classes(["a", "b"])
    assert len(fill(admission, A)) == 70
    assert len(fill(admission, B)) == 10


def test_a_class_that_was_refused_finds_room_when_it_comes_back():
    clock = Clock()
    admission = Admission(80, 1000, clock)
    flood = fill(admission, A)
    assert len(flood) == 80
    with pytest.raises(OverloadedError):
        admission.enter(B)
    for permit in flood[:20]:
        permit.release()
        # Whatever room there is, the flood asks first.
        with contextlib.suppress(OverloadedError):
            admission.enter(A)
    admission.enter(B)
    assert len(fill(admission, B)) == 9
    # A class that has not come back for a minute contends no more.
    clock.now = 61.0
    assert len(fill(Admission(8, 1000, clock), A)) == 8


def test_within_its_fair_part_a_class_may_take_what_is_kept_back():
    admission = Admission(80, 1000)
    for caller in (A, B):
        for _ in range(26):
            admission.enter(caller)
    for _ in range(26):
        admission.enter(C)
    with pytest.raises(OverloadedError, match="fair part of its class of 26"):
        admission.enter(A)


def test_tokens_are_kept_back_too():
    admission = Admission(80, 800)
    admission.name_classes(["a", "b"])
    admission.enter(A).grow(1, 700)
    late = admission.enter(A)
    with pytest.raises(OverloadedError, match="prompt tokens"):
        late.grow(1, 1)
    admission.enter(B).grow(1, 100)


def test_a_request_larger_than_what_is_not_kept_back_is_taken_when_it_is_alone():
    admission = Admission(80, 800)
    admission.name_classes(["a", "b"])
    admission.enter(A).grow(80, 10)


def test_a_token_holds_no_more_than_its_share():
    use = GrantUse(Grant("half", b"", share=0.5), Clock())
    caller = Caller("half", "", use)
    admission = Admission(8, 100)
    permits = fill(admission, caller)
    assert len(permits) == 4
    with pytest.raises(OverloadedError, match="share of this token of 4") as caught:
        admission.enter(caller)
    assert (caught.value.reason, caught.value.quota[0].subject) == ("RATE_LIMITED", "token:half")
    admission.enter(A)
    with pytest.raises(InvalidRequestError, match="more than the 50"):
        permits[0].grow(1, 51)
    permits.pop().release()
    admission.enter(caller)
