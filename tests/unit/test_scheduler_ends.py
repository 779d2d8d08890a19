"""Scheduler: ends from outside. Aborts in every state, deadlines, and what they leave behind."""

from __future__ import annotations

import pytest

from engine_core.scheduler.deadlines import SLACK as DEADLINES_SLACK
from engine_core.scheduler.output import FinishReason, ModelRunnerOutput
from engine_core.scheduler.request import RequestStatus
from fakes.driven_scheduler import DrivenScheduler
from fakes.request_factory import make_request, make_scheduler, request_key

ABORTED = RequestStatus.FINISHED_ABORTED


# -- ends from outside -------------------------------------------------------------------------------------------------


@pytest.mark.regression(4)
def test_abort_of_the_only_request_reaches_the_worker_once_in_an_empty_step() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, 3))
    engine.step()
    [output] = engine.abort(1)
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ABORTED
    assert engine.scheduler.stats().num_used_blocks == 0
    assert engine.scheduler.has_work
    engine.step()
    assert engine.worker.finished_keys == [request_key(1)]
    assert not engine.scheduler.has_work
    engine.step()
    assert engine.worker.finished_keys == [request_key(1)]


def test_abort_before_the_first_schedule_is_not_told_to_the_worker() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, 3))
    assert len(engine.abort(1)) == 1
    assert not engine.scheduler.has_work
    engine.step()
    assert engine.worker.finished_keys == []


@pytest.mark.regression(5)
def test_abort_during_the_final_step_wins_over_length() -> None:
    scheduler = make_scheduler()
    request = make_request(1, 3, max_tokens=1)
    scheduler.add_request(request, 0.0)
    step = scheduler.schedule(0.0)
    [output] = scheduler.finish_requests([request.key], ABORTED)
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ABORTED
    assert scheduler.update_from_output(step, ModelRunnerOutput([request.key], [[100]]), 0.0) == []


def test_abort_is_idempotent_and_ignores_strangers() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, 3))
    assert len(engine.abort(1, 1, 99)) == 1
    assert engine.abort(1, 99) == []
    assert engine.scheduler.finish_requests([], ABORTED) == []
    assert engine.scheduler.finish_requests(None, ABORTED) == []


def test_abort_of_nobody_is_not_an_abort_of_all() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, 3))
    assert engine.abort() == []
    assert len(engine.scheduler.requests) == 1


@pytest.mark.regression(8)
def test_blocks_of_an_aborted_request_serve_the_next_one_as_soon_as_no_step_writes_them() -> None:
    engine = DrivenScheduler(num_blocks=4, block_size=4)
    engine.add(make_request(1, 11, max_tokens=1))
    step = engine.scheduler.schedule(0.0)
    engine.abort(1)
    engine.add(make_request(2, 11, max_tokens=1))
    assert engine.scheduler.schedule(0.0).num_scheduled_tokens == {}
    engine.scheduler.update_from_output(step, engine.worker.execute(step), 0.0)
    assert engine.scheduler.schedule(0.0).num_scheduled_tokens == {request_key(2): 11}


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_expired_request_is_never_prefilled() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, 3, deadline=5.0), make_request(2, 3, queue_deadline=5.0))
    engine.now = 5.0
    outputs = engine.step()
    assert engine.scheduled == [{}]
    reasons = {handle: output.finish.error.reason for handle, output in outputs.items()}
    assert reasons == {1: "DEADLINE", 2: "QUEUE_TIMEOUT"}
    assert not engine.scheduler.has_work


def test_an_end_by_deadline_is_work_until_it_was_told() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request(1, 3, deadline=5.0), 0.0)
    assert scheduler.schedule(5.0).is_empty
    assert scheduler.has_work
    assert len(scheduler.take_expired_outputs()) == 1
    assert not scheduler.has_work


def test_queue_deadline_is_over_with_the_first_schedule_even_after_a_preemption() -> None:
    engine = DrivenScheduler(num_blocks=6, block_size=1, enable_caching=False)
    engine.add(make_request(1, 2, max_tokens=3), make_request(2, 3, max_tokens=2, queue_deadline=1.0))
    engine.step()
    engine.step()
    assert [request.key[1] for request in engine.scheduler.waiting] == [2]
    engine.now = 9.0
    assert engine.run()[2] == [101]


def test_deadline_of_an_ended_request_is_no_news() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, 3, max_tokens=1, deadline=5.0))
    engine.run()
    engine.now = 9.0
    assert engine.step() == {}


def test_far_deadlines_of_ended_requests_do_not_gather() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(0, 3, deadline=50.0))
    for handle in range(1, 3 * DEADLINES_SLACK):
        engine.add(make_request(handle, 1, deadline=1e9))
        engine.abort(handle)
    assert len(engine.scheduler._deadlines) <= DEADLINES_SLACK + 10
    engine.now = 50.0
    assert engine.step()[0].finish is not None
