"""Scheduler with steps in flight: fences, and preemption at every possible point."""

from __future__ import annotations

from collections import Counter

import pytest

from engine_core.scheduler.output import ModelRunnerOutput
from engine_core.scheduler.request import Request, RequestStatus
from fakes.flying_scheduler import FlyingScheduler
from fakes.request_factory import make_request, make_scheduler, request_key


@pytest.mark.regression(8)
def test_no_block_is_handed_out_while_an_older_step_may_write_it() -> None:
    """Request 1 ends with two steps in flight. Its blocks come back behind the newest of them, and not before."""
    engine = FlyingScheduler(num_blocks=7, block_size=2, enable_caching=False)
    engine.add(make_request(1, 5, max_tokens=6))
    assert engine.plan() == {1: 5}
    assert engine.plan() == {1: 1}
    engine.abort(1)
    # Six blocks are all there are, three of them fenced: it fits only into a cache that is empty.
    engine.add(make_request(2, 10, max_tokens=2))
    assert engine.plan() == {}
    engine.land()
    assert engine.scheduler.kv_cache_manager.num_fenced_blocks == 3
    assert engine.plan() == {}
    engine.land()
    assert engine.scheduler.kv_cache_manager.num_fenced_blocks == 0
    assert engine.plan() == {2: 10}


@pytest.mark.regression(9)
def test_fenced_blocks_are_waited_for_and_nobody_is_preempted() -> None:
    """Request 2 ends with most of the cache. The others need blocks meanwhile, and could only take each other's."""
    engine = FlyingScheduler(num_blocks=10, block_size=1, enable_caching=False)
    engine.add(*(make_request(handle, num_prompt, max_tokens=3) for handle, num_prompt in enumerate([1, 4, 1, 1], 1)))
    assert engine.plan() == {1: 1, 2: 4, 3: 1, 4: 1}
    # Two blocks were left: request 3 gets none, and requests 3 and 4 are in no step in flight after the next landing.
    assert engine.plan() == {1: 1, 2: 1}
    engine.land()
    engine.abort(2)
    assert engine.scheduler.kv_cache_manager.num_fenced_blocks == 5
    assert engine.plan() == {}
    assert engine.scheduler.stats().num_preemptions == 0
    engine.land()
    assert engine.plan() == {1: 1, 3: 1, 4: 1}
    while engine.scheduler.has_work or engine.flights:
        engine.fly(2)
    assert engine.scheduler.stats().num_preemptions == 0
    assert {handle: len(tokens) for handle, tokens in engine.tokens.items()} == {1: 3, 2: 1, 3: 3, 4: 3}


def six_requests() -> list[Request]:
    """Two beginnings, several lengths: 4 to 12 blocks of 2 each at their end."""
    return [
        make_request(handle, [*range(3 + handle % 2), *range(90 * handle, 90 * handle + handle)], max_tokens=5 + handle)
        for handle in range(1, 7)
    ]


ANSWERS = {handle: list(range(100, 105 + handle)) for handle in range(1, 7)}


@pytest.mark.regression(11)
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_cache_of_every_size_preempts_at_every_point_and_no_counter_underflows(max_in_flight: int) -> None:
    """From the size that holds the longest request alone, up to one block short of all: each forces its own points."""
    points: set[tuple[int, int]] = set()
    for num_blocks in range(11, 60):
        engine = FlyingScheduler(
            num_blocks=num_blocks, block_size=2, max_num_seqs=6, max_num_batched_tokens=8, enable_caching=num_blocks % 2
        )
        engine.add(*six_requests())
        while engine.scheduler.has_work or engine.flights:
            num_before = {request.key: request.num_preemptions for request in engine.requests}
            engine.fly(max_in_flight)
            points |= {
                (request.key[1], len(request.output_token_ids))
                for request in engine.requests
                if request.num_preemptions > num_before[request.key]
            }
        assert engine.tokens == ANSWERS
        assert all(request.num_in_flight_tokens == 0 for request in engine.requests)
        assert engine.scheduler.stats().num_used_blocks == 0
    # Before the first token, after it, and in the middle; of many requests.
    assert {num_output for _, num_output in points} >= {0, 1, 2, 3}
    assert len(points) >= 10


@pytest.mark.regression(11)
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_all_can_be_preempted_after_every_step(max_in_flight: int) -> None:
    """As a reset of the prefix cache does it: once the steps in flight are in, whatever they have found."""
    num_moves = 0
    while True:
        engine = FlyingScheduler(num_blocks=60, block_size=2, max_num_seqs=6, max_num_batched_tokens=8)
        engine.add(*six_requests())
        for _ in range(num_moves):
            engine.fly(max_in_flight)
        while engine.flights:
            engine.land()
        num_running = len(engine.scheduler.running)
        engine.scheduler.preempt_all(engine.now)
        engine.check()
        assert engine.scheduler.stats().num_used_blocks == 0
        while engine.scheduler.has_work or engine.flights:
            engine.fly(max_in_flight)
        assert engine.tokens == ANSWERS
        if num_moves and not num_running:
            break
        num_moves += 1
    assert num_moves > 10


@pytest.mark.regression(8)
@pytest.mark.regression(11)
def test_an_end_in_flight_takes_its_placeholders_along() -> None:
    """Aborted with two tokens in flight: what they bring is dropped, and counted down for nobody."""
    engine = FlyingScheduler()
    engine.add(make_request(1, 3, max_tokens=9), make_request(2, 3, max_tokens=3))
    engine.plan()
    engine.plan()
    assert engine.scheduler.requests[request_key(1)].num_in_flight_tokens == 2
    engine.abort(1)
    while engine.scheduler.has_work or engine.flights:
        engine.fly(2)
    assert engine.tokens == {2: [100, 101, 102]}
    assert engine.worker.finished_keys == [request_key(1), request_key(2)]


def test_a_handle_that_comes_again_does_not_get_its_predecessors_token() -> None:
    """The contract forbids it; a frontend that does it all the same must harm nobody else."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request(1, 4), 0.0)
    old = scheduler.schedule(0.0)
    scheduler.finish_requests([request_key(1)], RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request(1, 4), 0.0)
    new = scheduler.schedule(0.0)
    assert scheduler.update_from_output(old, ModelRunnerOutput([request_key(1)], [[77]]), 0.0) == []
    [output] = scheduler.update_from_output(new, ModelRunnerOutput([request_key(1)], [[78]]), 0.0)
    assert output.new_token_ids == [78]
    assert scheduler.check_integrity() == []


def test_a_window_that_fences_blocks_all_the_time_stalls_nobody() -> None:
    """Requests ahead take what comes back from their windows: one behind them must not wait for that for ever."""
    engine = FlyingScheduler(
        num_blocks=61, block_size=2, windows=(16,), enable_caching=False, max_num_seqs=16, max_num_batched_tokens=64
    )
    for handle in range(8):
        engine.add(make_request(handle, 4 + handle % 3, max_tokens=120))
    stalls: Counter[int] = Counter()
    longest = 0
    while engine.scheduler.has_work or engine.flights:
        planned = engine.plan()
        for request in engine.scheduler.running:
            handle = request.key[1]
            stalls[handle] = 0 if handle in planned else stalls[handle] + 1
            longest = max(longest, stalls[handle])
        if engine.flights and (len(engine.flights) == 2 or not planned):
            engine.land()
    assert engine.scheduler.stats().num_preemptions > 0
    assert longest <= 5
