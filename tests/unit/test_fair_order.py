"""Fairness between client classes: shares by weight, no credit for idling or for fresh names, and nobody starves."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.fair_order import FairOrder
from engine_core.scheduler.request import Request
from fakes.request_factory import make_request

WEIGHTS = {"gold": 3, "free": 1, "*": 2}


class Line:
    """A FairOrder with requests numbered as they come."""

    def __init__(self, **weights: int) -> None:
        self.order = FairOrder(ClientClasses(weights=weights))
        self.num_added = 0

    def add(self, client_class: str, num_tokens: int, arrival_time: float = 0.0) -> Request:
        self.num_added += 1
        request = make_request(self.num_added, num_tokens, client_class=client_class, arrival_time=arrival_time)
        request.order = self.num_added
        self.order.append(request)
        return request

    def serve(self) -> Request:
        request = self.order.peek()
        assert request is not None
        self.order.take(request)
        return request

    def serve_classes(self, num: int) -> list[str]:
        return [self.serve().client_class for _ in range(num)]


def test_one_class_is_served_by_arrival():
    line = Line()
    for arrival_time in (3.0, 1.0, 2.0, 1.0):
        line.add("a", 5, arrival_time)
    assert [line.serve().key[1] for _ in range(4)] == [2, 4, 3, 1]
    assert line.order.peek() is None
    assert len(line.order) == 0


def test_a_flood_of_one_class_leaves_every_other_turn_to_another():
    line = Line()
    for _ in range(6):
        line.add("flood", 10)
    for _ in range(3):
        line.add("trickle", 10, arrival_time=99.0)
    assert line.serve_classes(6) == ["flood", "trickle"] * 3


def test_turns_are_counted_in_tokens_not_in_requests():
    line = Line()
    for _ in range(2):
        line.add("long", 30)
    for _ in range(6):
        line.add("short", 10)
    served = line.serve_classes(8)
    assert served.index("long") == 2
    assert served == ["short", "short", "long", "short", "short", "short", "long", "short"]


def test_shares_follow_the_weights():
    line = Line(**WEIGHTS)
    for _ in range(60):
        for client_class in ("gold", "free", "other"):
            line.add(client_class, 10)
    assert Counter(line.serve_classes(60)) == {"gold": 30, "other": 20, "free": 10}


def test_without_a_class_the_session_is_the_class():
    order = FairOrder(ClientClasses())
    for number, session in enumerate(["a", "a", "a", "b"]):
        request = make_request(number, 4)
        request.key, request.order = (session, number), number
        order.append(request)
    served = []
    while (request := order.peek()) is not None:
        order.take(request)
        served.append(request.key[0])
    assert served == ["a", "b", "a", "a"]


def test_who_was_away_gets_no_more_than_its_turn():
    line = Line()
    for _ in range(100):
        line.add("steady", 10)
    line.serve_classes(50)
    for _ in range(50):
        line.add("late", 10, arrival_time=1.0)
    assert Counter(line.serve_classes(20)) == {"steady": 10, "late": 10}


def test_leaving_and_coming_back_earns_nothing():
    """A class that has one long request at a time, and comes back at once, gets its share of tokens, not of turns."""
    line = Line()
    for _ in range(100):
        line.add("steady", 10)
    line.add("comeback", 100)
    tokens: Counter[str] = Counter()
    for _ in range(66):
        request = line.serve()
        tokens[request.client_class] += request.num_tokens
        if request.client_class == "comeback":
            line.add("comeback", 100)
    assert abs(tokens["steady"] - tokens["comeback"]) <= 110


def test_what_was_aborted_is_not_charged():
    line = Line()
    for request in [line.add("a", 500) for _ in range(10)]:
        line.order.remove(request)
    line.add("a", 10)
    line.add("b", 10)
    assert line.serve_classes(2) == ["a", "b"]


def test_the_clock_does_not_go_back_for_a_class_that_asks_for_less_than_it_did():
    line = Line()
    long = line.add("b", 100)
    line.add("b", 1)
    for _ in range(9):
        line.add("a", 10)
    line.serve_classes(8)
    line.order.remove(long)
    assert line.serve_classes(1) == ["b"]
    line.add("newcomer", 10, arrival_time=9.0)
    assert line.serve_classes(2) == ["a", "newcomer"]


def test_a_stranger_is_refused():
    line = Line()
    with pytest.raises(KeyError):
        line.order.remove(make_request(1, 3))


def test_new_names_for_ever_do_not_keep_an_old_one_waiting():
    line = Line(**{"*": 50})
    line.add("old", 100)
    for number in range(200):
        line.add(f"new {number}", 1)
        if line.serve().client_class == "old":
            break
    assert number <= 100


class Model:
    """The rule by its definition, with exact numbers and no data structure: every choice looks at everybody."""

    def __init__(self) -> None:
        self.clock = Fraction(0)
        self.requests: list[Request] = []
        self.turn_began: dict[str, Fraction] = {}

    def weight(self, name: str) -> int:
        return WEIGHTS.get(name, WEIGHTS["*"])

    def due(self, request: Request) -> Fraction:
        name = request.client_class
        return self.turn_began[name] + Fraction(request.num_tokens, self.weight(name))

    def add(self, request: Request) -> None:
        self.turn_began.setdefault(request.client_class, self.clock)
        self.requests.append(request)

    def heads(self) -> list[Request]:
        by_arrival = sorted(self.requests, key=lambda one: (one.arrival_time, one.order), reverse=True)
        return list({one.client_class: one for one in by_arrival}.values())

    def next(self) -> Request:
        return min(self.heads(), key=lambda one: (self.due(one), one.arrival_time, one.order))

    def serve(self, request: Request) -> None:
        self.turn_began[request.client_class] = self.due(request)
        self.clock = max(self.clock, self.turn_began[request.client_class])
        self.leave(request)

    def leave(self, request: Request) -> None:
        self.requests.remove(request)
        if all(one.client_class != request.client_class for one in self.requests):
            del self.turn_began[request.client_class]


CLASSES = st.sampled_from(["gold", "free", "other", "fresh"])
# Multiples of 6: with these weights all virtual times are whole, so that the model is exact.
TOKENS = st.integers(1, 9).map(lambda number: 6 * number)
MOST_TOKENS = 54
MOVES = st.lists(
    st.tuples(st.sampled_from(["add", "add", "serve", "serve", "remove"]), CLASSES, TOKENS, st.integers(0, 5)),
    max_size=60,
)


@settings(derandomize=True, deadline=None, max_examples=400)
@given(moves=MOVES)
def test_every_choice_is_that_of_the_model_and_nobody_starves(moves: list[tuple[str, str, int, int]]):
    line, model = Line(**WEIGHTS), Model()
    # Tokens that each class was served while a request was the head of its own.
    meanwhile: dict[int, Counter[str]] = {}
    for move, client_class, num_tokens, value in moves:
        if move == "add":
            # A name that nobody has had: a caller who never uses one twice.
            name = f"fresh {line.num_added}" if client_class == "fresh" else client_class
            model.add(line.add(name, num_tokens, arrival_time=float(value)))
        elif model.requests and move == "remove":
            request = model.requests[value % len(model.requests)]
            line.order.remove(request)
            model.leave(request)
        elif model.requests:
            expected = model.next()
            request = line.serve()
            assert request is expected
            model.serve(request)
            for order in meanwhile:
                meanwhile[order][request.client_class] += request.num_tokens
        heads = {request.order: request for request in model.heads()}
        meanwhile = {order: meanwhile.get(order, Counter()) for order in heads}
        for order, head in heads.items():
            for other, tokens in meanwhile[order].items():
                weight, other_weight = model.weight(head.client_class), model.weight(other)
                # No class gets ahead of another that waits by more than the largest request of each.
                assert Fraction(tokens, other_weight) <= Fraction(MOST_TOKENS, weight) + Fraction(
                    MOST_TOKENS, other_weight
                )
        assert len(line.order) == len(model.requests)
