"""The scheduler under a pause: who gets tokens, what counts as work, and how everything is preempted."""

from __future__ import annotations

from engine_core.scheduler.pause_state import PauseState
from engine_core.scheduler.request import EventType, RequestStatus
from fakes.driven_scheduler import DrivenScheduler
from fakes.request_factory import make_request


def test_new_admits_nobody_and_lets_the_running_finish():
    driven = DrivenScheduler(max_num_seqs=2)
    driven.add(*(make_request(handle, 4, max_tokens=3) for handle in (1, 2, 3)))
    driven.step()
    driven.scheduler.pause_state = PauseState.NEW
    driven.add(make_request(4, 4))
    while driven.scheduler.has_work:
        driven.step()
    assert [set(scheduled) for scheduled in driven.scheduled] == [{1, 2}, {1, 2}, {1, 2}, set()]
    assert [request.key[1] for request in driven.scheduler.waiting] == [3, 4]
    driven.scheduler.pause_state = PauseState.NONE
    assert set(driven.run()) == {3, 4}


def test_all_gives_nobody_tokens_and_still_tells_of_ends():
    driven = DrivenScheduler()
    driven.add(make_request(1, 4), make_request(2, 4))
    driven.step()
    driven.scheduler.pause_state = PauseState.ALL
    assert not driven.scheduler.has_work
    driven.abort(1)
    assert driven.scheduler.has_work
    assert driven.step() == {}
    assert driven.scheduled[-1] == {}
    assert set(driven.worker.requests) == {("session", 2)}
    assert not driven.scheduler.has_work
    driven.scheduler.pause_state = PauseState.NONE
    assert driven.run() == {2: [101, 102, 103]}


def test_deadlines_pass_without_a_step():
    driven = DrivenScheduler()
    driven.add(make_request(1, 4, deadline=5.0), make_request(2, 4, queue_deadline=7.0))
    driven.scheduler.pause_state = PauseState.ALL
    assert driven.scheduler.next_deadline == 5.0
    driven.scheduler.expire(4.0)
    assert not driven.scheduler.has_work
    driven.scheduler.expire(5.0)
    assert driven.scheduler.has_work
    assert driven.step()[1].finish.error.reason == "DEADLINE"
    assert driven.scheduler.next_deadline == 7.0


def test_preempt_all_keeps_the_order_and_the_tokens():
    driven = DrivenScheduler()
    driven.add(*(make_request(handle, 4, max_tokens=4) for handle in (1, 2, 3)))
    first = driven.step()
    running = list(driven.scheduler.running)
    driven.scheduler.preempt_all(driven.now)
    assert driven.scheduler.running == []
    assert list(driven.scheduler.waiting) == running
    assert {request.status for request in running} == {RequestStatus.PREEMPTED}
    assert all(request.events[-1][0] is EventType.PREEMPTED for request in running)
    assert driven.scheduler.stats().num_used_blocks == 0
    rest = driven.run()
    assert {handle: first[handle].new_token_ids + rest[handle] for handle in rest} == {
        handle: [100, 101, 102, 103] for handle in (1, 2, 3)
    }
