"""RequestQueue: first come, first served, with removal anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.scheduler.request_queue import RequestQueue
from fakes.request_factory import make_request


def test_serves_in_order_of_arrival() -> None:
    queue = RequestQueue()
    requests = [make_request(handle, 3) for handle in range(3)]
    for request in requests:
        queue.append(request)
    assert list(queue) == requests
    assert queue.peek() is requests[0]
    assert len(queue) == 3


def test_preempted_request_is_served_first() -> None:
    queue = RequestQueue()
    waiting, preempted = make_request(1, 3), make_request(2, 3)
    queue.append(waiting)
    queue.prepend(preempted)
    assert list(queue) == [preempted, waiting]


def test_removal_keeps_the_order_of_the_others() -> None:
    queue = RequestQueue()
    first, middle, last = (make_request(handle, 3) for handle in range(3))
    for request in (first, middle, last):
        queue.append(request)
    queue.remove(middle)
    assert list(queue) == [first, last]


def test_empty_queue_is_false() -> None:
    assert not RequestQueue()


def test_removing_a_stranger_is_an_error() -> None:
    queue = RequestQueue()
    queue.append(make_request(1, 3))
    with pytest.raises(KeyError):
        queue.remove(make_request(2, 3))
    assert queue.num_tokens == 3


@settings(derandomize=True, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["append", "prepend", "remove"]), st.integers(0, 5))))
def test_tokens_and_order_equal_those_of_a_list(moves: list[tuple[str, int]]) -> None:
    queue = RequestQueue()
    requests = [make_request(handle, handle + 1, output_token_ids=[7] * handle) for handle in range(6)]
    model = []
    for move, handle in moves:
        request = requests[handle]
        if (request in model) != (move == "remove"):
            continue
        getattr(queue, move)(request)
        if move == "remove":
            model.remove(request)
        else:
            model.insert(0 if move == "prepend" else len(model), request)
        assert list(queue) == model
        assert queue.num_tokens == sum(2 * queued.key[1] + 1 for queued in model)
