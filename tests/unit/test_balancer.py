"""Picking an engine by load."""

from __future__ import annotations

from frontend.engine_client.balancer import Candidate, LeastLoaded, score
from frontend.engine_client.engine_facts import EngineLoad


def candidate(running: int = 0, waiting: int = 0, num_unreported: int = 0, num_frontends: int = 1) -> Candidate:
    return Candidate(EngineLoad(running, waiting, num_frontends), num_unreported)


def test_waiting_weighs_four_times_as_much_as_running():
    assert score(candidate(running=3, waiting=2)) == 11


def test_what_is_not_reported_yet_waits_once_for_each_frontend():
    assert score(candidate(running=1, waiting=1, num_unreported=2, num_frontends=3)) == 4 * (1 + 6) + 1


def test_the_least_loaded_wins_whoevers_turn_it_is():
    for start in range(3):
        assert LeastLoaded(start).pick([candidate(3), candidate(1), candidate(waiting=1)]) == 1


def test_equals_take_turns_and_frontends_begin_with_different_ones():
    for start in range(3):
        balancer = LeastLoaded(start)
        picked = [balancer.pick([candidate()] * 3) for _ in range(4)]
        assert picked == [(start + turn) % 3 for turn in (1, 2, 3, 4)]
