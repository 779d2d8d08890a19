"""The last places among the running requests: for classes that have less than their part."""

from __future__ import annotations

import pytest

from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.fair_order import FairOrder
from engine_core.scheduler.fair_places import RECENT_S, FairPlaces
from fakes.driven_scheduler import DrivenScheduler
from fakes.request_factory import make_request


def running(**counts: int):
    return [
        make_request(number, 4, client_class=name) for name, count in counts.items() for number in range(1, count + 1)
    ]


def test_places_are_anybodys_until_the_last_eighth():
    places = FairPlaces(16, ClientClasses())
    assert places.are_open(running(a=13))
    assert not places.are_open(running(a=14))


def test_whoever_has_its_part_of_the_places_is_full_while_others_contend():
    places = FairPlaces(16, ClientClasses())
    assert places.full_classes(running(a=14), [], now=0.0) == frozenset()
    assert places.full_classes(running(a=14), ["b"], now=0.0) == {"a"}
    assert places.full_classes(running(a=7, b=7), [], now=0.0) == frozenset()
    assert places.full_classes(running(a=8, b=6), [], now=0.0) == {"a"}
    assert places.full_classes(running(a=7, b=7), ["c"], now=0.0) == {"a", "b"}


def test_parts_go_by_weight():
    places = FairPlaces(16, ClientClasses(weights={"gold": 3}))
    assert places.full_classes(running(gold=11, free=3), [], now=0.0) == frozenset()
    assert places.full_classes(running(gold=10, free=4), [], now=0.0) == {"free"}


def test_a_class_contends_for_a_minute_after_it_has_asked():
    places = FairPlaces(16, ClientClasses())
    places.note(make_request(1, 4, client_class="b", arrival_time=100.0))
    assert places.full_classes(running(a=14), [], now=100.0 + RECENT_S) == {"a"}
    assert places.full_classes(running(a=14), [], now=100.1 + RECENT_S) == frozenset(), "nobody else has come since"


def test_places_kept_for_a_class_that_stays_away_are_given_to_a_backlog():
    engine = DrivenScheduler(num_blocks=801, max_num_seqs=16, max_num_batched_tokens=512, scheduling_policy="fair")
    engine.add(make_request(1, 5, max_tokens=1, client_class="b"))
    engine.step()
    engine.add(*(make_request(handle, 5, max_tokens=200, client_class="a") for handle in range(2, 40)))
    engine.step()
    assert len(engine.scheduler.running) == 14
    engine.now = RECENT_S + 1
    engine.step()
    assert len(engine.scheduler.running) == 16


def test_who_was_passed_over_gets_nothing_for_it_later():
    order = FairOrder(ClientClasses())
    handles = iter(range(1, 100))

    def add(name: str) -> None:
        order.append(make_request(next(handles), 10, client_class=name))

    for name in ("flood",) * 6 + ("quiet",) * 9:
        add(name)
    for _ in range(5):
        request = order.peek_beside(frozenset({"flood"}))
        assert request is not None
        assert request.client_class == "quiet"
        order.take(request)
    turns = []
    while (request := order.peek()) is not None:
        order.take(request)
        turns.append(request.client_class)
    assert turns[:8] == ["flood", "quiet"] * 4 or turns[:8] == ["quiet", "flood"] * 4


@pytest.mark.parametrize(("policy", "quiet_runs"), [("fair", True), ("fcfs", False)])
def test_a_place_is_left_for_a_class_that_comes_after_the_flood(policy: str, quiet_runs: bool):
    engine = DrivenScheduler(max_num_seqs=8, max_num_batched_tokens=200, num_blocks=200, scheduling_policy=policy)
    engine.add(make_request(99, 4, client_class="quiet", max_tokens=1))
    engine.step()
    engine.add(*(make_request(number, 4, client_class="loud", max_tokens=50) for number in range(1, 30)))
    engine.step()
    assert len(engine.scheduler.running) == (7 if quiet_runs else 8)
    engine.add(make_request(100, 4, client_class="quiet", max_tokens=4))
    engine.step()
    assert (100 in [request.key[1] for request in engine.scheduler.running]) is quiet_runs
    assert len(engine.scheduler.running) == 8


def test_a_flood_that_nobody_contends_with_has_all_places():
    engine = DrivenScheduler(max_num_seqs=8, max_num_batched_tokens=200, num_blocks=200, scheduling_policy="fair")
    engine.add(*(make_request(number, 4, client_class="loud", max_tokens=50) for number in range(1, 30)))
    engine.step()
    assert len(engine.scheduler.running) == 8
