"""Deadlines: what has passed comes out once, soonest first."""

from __future__ import annotations

import pytest

from engine_core.scheduler.deadlines import Deadlines
from fakes.request_factory import make_request, request_key


def passed(deadlines: Deadlines, now: float) -> list[tuple[int, bool]]:
    return [(key[1], is_queue_deadline) for key, is_queue_deadline in deadlines.pop_passed(now)]


def test_request_without_deadline_never_passes() -> None:
    deadlines = Deadlines()
    deadlines.push(make_request(1, 3))
    assert passed(deadlines, 1e12) == []


def test_deadline_passes_at_its_time_and_once() -> None:
    deadlines = Deadlines()
    deadlines.push(make_request(1, 3, deadline=5.0))
    assert passed(deadlines, 4.999) == []
    assert passed(deadlines, 5.0) == [(1, False)]
    assert passed(deadlines, 6.0) == []


def test_soonest_comes_first_and_ties_keep_the_order_of_arrival() -> None:
    deadlines = Deadlines()
    for handle, time in [(1, 3.0), (2, 1.0), (3, 3.0), (4, 9.0), (5, 2.0)]:
        deadlines.push(make_request(handle, 3, deadline=time))
    assert passed(deadlines, 5.0) == [(2, False), (5, False), (1, False), (3, False)]


def test_both_deadlines_of_a_request_are_watched() -> None:
    deadlines = Deadlines()
    deadlines.push(make_request(1, 3, deadline=5.0, queue_deadline=2.0))
    assert passed(deadlines, 2.0) == [(1, True)]
    assert passed(deadlines, 5.0) == [(1, False)]


def test_key_is_the_key_of_the_request() -> None:
    deadlines = Deadlines()
    deadlines.push(make_request(7, 3, queue_deadline=0.0))
    assert list(deadlines.pop_passed(0.0)) == [(request_key(7), True)]


def test_entries_of_ended_requests_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.scheduler.deadlines.SLACK", 0)
    deadlines = Deadlines()
    for handle, time in [(1, 3.0), (2, 1.0), (3, 2.0)]:
        deadlines.push(make_request(handle, 3, deadline=time, queue_deadline=time))
    deadlines.forget_ended({request_key(1), request_key(3)})
    assert len(deadlines) == 4
    assert passed(deadlines, 2.5) == [(3, False), (3, True)]
    assert passed(deadlines, 9.0) == [(1, False), (1, True)]
