"""RequestQueue and WaitingQueue: who waits, how much, and who is next under each policy."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_queue import RequestQueue
from engine_core.scheduler.scheduling_policy import SchedulingPolicy
from engine_core.scheduler.waiting_queue import WaitingQueue
from fakes.request_factory import make_request
from fakes.scripted_grammar import ScriptedGrammar


def waiting_queue(policy: str, **best_priorities: int) -> WaitingQueue:
    return WaitingQueue(SchedulingPolicy(policy), ClientClasses(best_priorities=best_priorities))


def served(queue: WaitingQueue) -> list[int]:
    handles = []
    while (request := queue.peek()) is not None:
        queue.take(request)
        handles.append(request.key[1])
    assert len(queue) == 0
    assert queue.num_tokens == 0
    return handles


def run_and_preempt(queue: WaitingQueue, request: Request) -> None:
    queue.append(request)
    queue.take(request)
    request.num_cached_tokens = 0
    queue.put_back(request)


@pytest.mark.parametrize("queue", [RequestQueue(), waiting_queue("fcfs"), waiting_queue("fair")])
def test_counts_requests_and_tokens_and_refuses_strangers(queue: RequestQueue):
    assert not queue
    assert queue.oldest_arrival is None
    for handle in (1, 2, 3):
        queue.append(make_request(handle, handle, output_token_ids=[7], arrival_time=9.0 - handle))
    assert (len(queue), queue.num_tokens, queue.oldest_arrival) == (3, 9, 6.0)
    with pytest.raises(KeyError):
        queue.remove(make_request(4, 3))
    assert (len(queue), queue.num_tokens) == (3, 9)
    for request in list(queue):
        queue.remove(request)
    assert (len(queue), queue.num_tokens) == (0, 0)


def test_fcfs_is_the_order_of_queueing_whatever_was_asked_for():
    queue = waiting_queue("fcfs")
    for handle, priority, arrival_time in ((1, 5, 3.0), (2, -5, 2.0), (3, 0, 1.0)):
        queue.append(make_request(handle, 3, priority=priority, arrival_time=arrival_time, client_class=str(handle)))
    assert [request.key[1] for request in queue] == [1, 2, 3]
    assert served(queue) == [1, 2, 3]


def test_fair_serves_classes_in_turn_and_each_by_arrival_whatever_priority_was_asked_for():
    queue = waiting_queue("fair")
    for handle, name, priority in ((1, "a", 5), (2, "a", -5), (3, "a", 0), (4, "b", 9)):
        queue.append(make_request(handle, 3, priority=priority, arrival_time=float(handle), client_class=name))
    assert served(queue) == [1, 4, 2, 3]


def test_lower_priority_values_come_first_then_arrival_then_the_order_of_queueing():
    queue = waiting_queue("priority")
    for handle, priority, arrival_time in ((1, 1, 0.0), (2, 0, 7.0), (3, 0, 5.0), (4, -1, 9.0), (5, 0, 5.0)):
        queue.append(make_request(handle, 3, priority=priority, arrival_time=arrival_time))
    assert [request.key[1] for request in queue] == [4, 3, 5, 2, 1]
    assert served(queue) == [4, 3, 5, 2, 1]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_goes_before_new_ones_of_its_priority(policy: str):
    queue = waiting_queue(policy)
    queue.append(make_request(1, 3))
    queue.append(make_request(2, 3))
    for handle in (4, 3):
        run_and_preempt(queue, make_request(handle, 3, arrival_time=float(handle)))
    assert served(queue) == ([4, 3, 1, 2] if policy == "fcfs" else [3, 4, 1, 2])


def test_a_new_request_of_a_better_priority_goes_before_a_preempted_one_unless_new_ones_are_held():
    queue = waiting_queue("priority")
    run_and_preempt(queue, make_request(1, 3, priority=1))
    queue.append(make_request(2, 3, priority=0))
    assert queue.has_preempted
    assert queue.peek(only_preempted=True) is next(one for one in queue if one.key[1] == 1)
    assert served(queue) == [2, 1]
    assert not queue.has_preempted
    assert queue.peek(only_preempted=True) is None


def test_who_was_set_aside_returns_to_its_place():
    queue = waiting_queue("fcfs")
    requests = [make_request(handle, 3) for handle in (1, 2, 3)]
    for request in requests:
        queue.append(request)
    for request in requests[:2]:
        queue.remove(request)
    for request in reversed(requests[:2]):
        queue.put_back(request)
    assert served(queue) == [1, 2, 3]


def test_a_class_gets_no_better_priority_than_its_own():
    queue = waiting_queue("priority", batch=5, **{"*": 0})
    for handle, client_class, priority in ((1, "batch", -9), (2, "batch", 7), (3, "other", -9), (4, "", -9)):
        request = make_request(handle, 3, client_class=client_class, priority=priority)
        queue.append(request)
    assert [request.priority for request in sorted(queue, key=lambda one: one.key)] == [5, 7, 0, 0]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_left_the_middle_of_the_line_is_not_kept_alive(policy: str):
    queue, grammar = waiting_queue(policy), ScriptedGrammar()
    # The first one stays, so that what leaves behind it comes to the top of no heap.
    queue.append(make_request(0, 3))
    request = make_request(1, 3, grammar=grammar)
    queue.append(request)
    queue.remove(request)
    alive = weakref.ref(grammar)
    del request, grammar
    gc.collect()
    assert alive() is None
    assert len(queue) == 1


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    policy=st.sampled_from(list(SchedulingPolicy)),
    moves=st.lists(st.tuples(st.sampled_from(["add", "add", "take", "remove", "preempt"]), st.integers(0, 99))),
)
def test_order_equals_that_of_a_sorted_list(policy: SchedulingPolicy, moves: list[tuple[str, int]]):
    """With one class there are no turns to take: the next one is the least by (priority, begun or not, arrival)."""
    queue, model = WaitingQueue(policy, ClientClasses()), []
    for number, (move, value) in enumerate(moves):
        if move == "add":
            request = make_request(number, 1 + value % 5, priority=value % 3, arrival_time=float(value % 7))
            queue.append(request)
            model.append(request)
        elif model:
            request = queue.peek() if move != "remove" else model[value % len(model)]
            getattr(queue, "remove" if move == "remove" else "take")(request)
            model.remove(request)
            if move == "preempt":
                request.num_cached_tokens = 0
                queue.put_back(request)
                model.append(request)
        if policy is SchedulingPolicy.FCFS:
            model.sort(key=lambda one: (not one.was_scheduled, one.key[1]))
        else:
            model.sort(key=lambda one: (one.priority, not one.was_scheduled, one.arrival_time, one.key[1]))
        assert list(queue) == model
        assert queue.peek() is (model[0] if model else None)
        assert queue.num_tokens == sum(one.num_tokens for one in model)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_the_oldest_arrival_is_known_without_a_walk(changes) -> None:
    queue = RequestQueue()
    waiting: list[Request] = []
    for handle, (comes, number) in enumerate(changes):
        if comes or not waiting:
            request = make_request(handle, 3)
            request.arrival_time = float(number)
            # Preempted: it does not count.
            request.num_cached_tokens = 0 if number == 5 else None
            waiting.append(request)
            queue.append(request)
        else:
            queue.remove(waiting.pop(number % len(waiting)))
        arrivals = [one.arrival_time for one in waiting if not one.was_scheduled]
        assert queue.oldest_arrival == min(arrivals, default=None)
