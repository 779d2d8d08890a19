"""Unanswered pings: lost against slow, with time as an argument."""

from __future__ import annotations

from frontend.engine_client.heartbeat import DEFAULT_INTERVAL_S, STALL_S, Heartbeat
from stepwire.engine.v1 import engine_core_pb2 as pb


def pong(ping: pb.Ping) -> pb.Pong:
    return pb.Pong(nonce=ping.nonce, through_step_loop=ping.through_step_loop)


def test_every_second_interval_asks_the_step_loop_too():
    heartbeat = Heartbeat(5, 15)
    rounds = [[ping.through_step_loop for ping in heartbeat.pings(now)] for now in (0, 5, 10, 15)]
    assert rounds == [[False, True], [False], [False, True], [False]]


def test_nonces_are_unique_and_carry_our_clock():
    heartbeat = Heartbeat(5, 15)
    pings = [ping for now in (1.5, 6.5) for ping in heartbeat.pings(now)]
    assert len({ping.nonce for ping in pings}) == len(pings)
    assert pings[0].client_monotonic_ns == 1_500_000_000


def test_lost_counts_from_the_oldest_unanswered_ping():
    heartbeat = Heartbeat(5, 15)
    assert heartbeat.lost_at() is None
    first = list(heartbeat.pings(100))
    second = list(heartbeat.pings(105))
    assert heartbeat.lost_at() == 115
    heartbeat.on_pong(pong(first[0]))
    assert heartbeat.lost_at() == 120
    heartbeat.on_pong(pong(second[0]))
    assert heartbeat.lost_at() is None


def test_a_later_answer_stands_for_earlier_ones_of_its_kind():
    heartbeat = Heartbeat(5, 15)
    pings = [list(heartbeat.pings(now)) for now in (0, 5, 10)]
    heartbeat.on_pong(pong(pings[2][0]))
    assert heartbeat.lost_at() is None
    # The step loop has answered nothing yet.
    assert heartbeat.is_stalled(STALL_S + 0.1)
    heartbeat.on_pong(pong(pings[2][1]))
    assert not heartbeat.is_stalled(STALL_S + 0.1)


def test_any_frame_is_a_sign_of_life_but_not_of_the_step_loop():
    heartbeat = Heartbeat(5, 15)
    list(heartbeat.pings(0))
    heartbeat.received()
    heartbeat.heard(STALL_S + 1)
    assert heartbeat.lost_at() == STALL_S + 16
    assert heartbeat.is_stalled(STALL_S + 1)


def test_an_engine_is_not_lost_while_a_frame_of_it_is_being_processed():
    heartbeat = Heartbeat(5, 15)
    list(heartbeat.pings(0))
    heartbeat.received()
    assert heartbeat.lost_at() == float("inf")
    heartbeat.excuse(100, 200)
    heartbeat.heard(200)
    assert heartbeat.lost_at() == 215


def test_time_in_which_nothing_could_be_heard_is_no_silence():
    heartbeat = Heartbeat(5, 15)
    heartbeat.excuse(3, 3)
    list(heartbeat.pings(0))
    assert heartbeat.lost_at() == 15
    heartbeat.excuse(20, 20)
    assert heartbeat.lost_at() == 35
    # A frame that was read since then needs no excuse.
    heartbeat.heard(30)
    heartbeat.excuse(20, 31)
    assert heartbeat.lost_at() == 46


def test_slow_is_not_lost():
    heartbeat = Heartbeat(5, 15)
    for now in range(0, 40, 5):
        for ping in heartbeat.pings(now):
            if not ping.through_step_loop:
                heartbeat.on_pong(pong(ping))
    assert heartbeat.lost_at() is None
    assert not heartbeat.is_stalled(STALL_S)
    assert heartbeat.is_stalled(STALL_S + 1)


def test_an_engine_that_says_nothing_gets_the_defaults():
    heartbeat = Heartbeat(0, 0)
    assert heartbeat.interval_s == DEFAULT_INTERVAL_S
    list(heartbeat.pings(0))
    assert heartbeat.lost_at() == 15
