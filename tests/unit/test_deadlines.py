"""Deadlines: what has passed comes out once, soonest first."""

from __future__ import annotations

import pytest

from engine_core.scheduler.deadlines import DEADLINE, QUEUE_TIMEOUT, Deadlines
from engine_core.scheduler.request import Request, RequestKey
from fakes.request_factory import make_request


class Watched:
    """Deadlines of some live requests."""

    def __init__(self) -> None:
        self.deadlines = Deadlines()
        self.live: dict[RequestKey, Request] = {}

    def push(self, request: Request) -> None:
        self.live[request.key] = request
        self.deadlines.push(request)

    def expired(self, now: float) -> list[tuple[int, str]]:
        return [(request.key[1], error.reason) for request, error in self.deadlines.pop_expired(now, self.live)]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_request_without_deadline_never_passes(watched: Watched) -> None:
    watched.push(make_request(1, 3))
    assert watched.expired(1e12) == []


def test_deadline_passes_at_its_time_and_once(watched: Watched) -> None:
    watched.push(make_request(1, 3, deadline=5.0))
    assert watched.expired(4.999) == []
    assert watched.expired(5.0) == [(1, DEADLINE.reason)]
    assert watched.expired(6.0) == []


def test_soonest_comes_first_and_ties_keep_the_order_of_arrival(watched: Watched) -> None:
    for handle, time in [(1, 3.0), (2, 1.0), (3, 3.0), (4, 9.0), (5, 2.0)]:
        watched.push(make_request(handle, 3, deadline=time))
    assert [handle for handle, _ in watched.expired(5.0)] == [2, 5, 1, 3]


def test_both_deadlines_of_a_request_are_watched(watched: Watched) -> None:
    watched.push(make_request(1, 3, deadline=5.0, queue_deadline=2.0))
    assert watched.expired(2.0) == [(1, QUEUE_TIMEOUT.reason)]
    assert watched.expired(5.0) == [(1, DEADLINE.reason)]


def test_the_time_in_the_queue_is_over_with_the_first_schedule(watched: Watched) -> None:
    request = make_request(1, 3, queue_deadline=2.0)
    watched.push(request)
    request.num_cached_tokens = 0
    assert watched.expired(2.0) == []


def test_ended_requests_do_not_expire(watched: Watched) -> None:
    watched.push(make_request(7, 3, deadline=0.0))
    watched.live.clear()
    assert watched.expired(0.0) == []


def test_entries_of_ended_requests_can_be_forgotten(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.scheduler.deadlines.SLACK", 0)
    for handle, time in [(1, 3.0), (2, 1.0), (3, 2.0)]:
        watched.push(make_request(handle, 3, deadline=time, queue_deadline=time))
    ended = watched.live.pop(("session", 2))
    watched.deadlines.forget_ended(watched.live)
    assert len(watched.deadlines) == 4
    watched.live[ended.key] = ended
    assert [handle for handle, _ in watched.expired(2.5)] == [3, 3]
    assert [handle for handle, _ in watched.expired(9.0)] == [1, 1]
