"""Scheduler: prefix hits as requests see them, what is counted, and that nothing is left over."""

from __future__ import annotations

import gc

import pytest

from engine_core.scheduler.request import LogprobsParams, Request, RequestStatus
from fakes.driven_scheduler import DrivenScheduler
from fakes.request_factory import make_request, request_key

ABORTED = RequestStatus.FINISHED_ABORTED


# -- prefix cache ------------------------------------------------------------------------------------------------------


@pytest.mark.regression(24)
def test_tenants_share_no_block() -> None:
    engine = DrivenScheduler(num_blocks=33)
    for handle, salt in enumerate(["a", "b", ""]):
        engine.add(make_request(handle, range(12), cache_salt=salt))
    engine.step()
    engine.step()
    tables = [engine.scheduler.kv_cache_manager.block_ids(request_key(handle))[0] for handle in range(3)]
    assert len({block_id for table in tables for block_id in table}) == sum(map(len, tables)) > 0
    assert engine.scheduler.stats().prefix_hit_tokens == 0


def test_bypass_writes_the_cache_but_does_not_read_it() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, range(9), max_tokens=1, bypass_prefix_cache=True))
    engine.run()
    engine.add(make_request(2, range(9), max_tokens=1))
    engine.step()
    engine.add(make_request(3, range(9), max_tokens=1, bypass_prefix_cache=True))
    engine.step()
    assert engine.scheduled[-2:] == [{2: 1}, {3: 9}]


def test_output_of_one_turn_is_a_hit_in_the_next() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, range(6), max_tokens=7))
    [answer] = engine.run().values()
    engine.add(make_request(2, [*range(6), *answer, 5], max_tokens=1))
    engine.step()
    # 13 tokens were known at the end, and the last of them was never computed: 3 full blocks.
    assert engine.scheduled[-1] == {2: 2}


def test_lookups_after_a_preemption_are_counted_apart() -> None:
    engine = DrivenScheduler(num_blocks=5, block_size=4)
    engine.add(make_request(1, 8, max_tokens=4), make_request(2, 8, max_tokens=4))
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (16, 0)
    # 8 prompt tokens and the one of output; one of its two full blocks was still there.
    assert (stats.preempted_query_tokens, stats.preempted_hit_tokens) == (9, 4)


def test_who_may_not_read_the_cache_looks_nothing_up() -> None:
    """Else such requests would make the hit rate look bad."""
    engine = DrivenScheduler()
    engine.add(make_request(1, range(9), max_tokens=1, bypass_prefix_cache=True))
    engine.add(make_request(2, range(9), max_tokens=1, logprobs=LogprobsParams(num_prompt=0)))
    engine.run()
    assert engine.scheduler.stats().prefix_query_tokens == 0
    engine.add(make_request(3, range(9), max_tokens=1))
    engine.run()
    assert engine.scheduler.stats().prefix_query_tokens == 9


# -- statistics and leftovers ------------------------------------------------------------------------------------------


def test_stats() -> None:
    engine = DrivenScheduler(num_blocks=9, block_size=4, max_num_seqs=1)
    engine.add(
        make_request(1, 5, max_tokens=2), make_request(2, 7, arrival_time=1.5), make_request(3, 6, arrival_time=2.0)
    )
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 2, 13)
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.num_total_blocks) == (2, 0, 8)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (5, 1)
    assert stats.oldest_waiting_time == 1.5


def test_queued_tokens_are_those_that_the_cache_did_not_hold_at_the_arrival() -> None:
    engine = DrivenScheduler(num_blocks=33, max_num_seqs=1)
    engine.add(make_request(1, range(12), max_tokens=1))
    engine.run()
    engine.add(make_request(2, 5))
    engine.step()
    # Three blocks of the first; none of the second, which may not read the cache.
    engine.add(make_request(3, range(13)), make_request(4, range(12), bypass_prefix_cache=True))
    assert engine.scheduler.stats().num_waiting_tokens == 1 + 12
    engine.abort(3)
    assert engine.scheduler.stats().num_waiting_tokens == 12
    engine.run()
    assert engine.scheduler.stats().num_waiting_tokens == 0


def test_the_limit_of_queued_tokens_is_one_of_all_tokens() -> None:
    engine = DrivenScheduler(num_blocks=33, max_queued_tokens=25)
    engine.add(make_request(1, range(12), max_tokens=1))
    engine.run()
    engine.add(make_request(2, range(13)))
    finish = engine.scheduler.add_request(make_request(3, range(13)), 0.0).finish
    assert finish is not None
    assert finish.error is not None
    assert "13 tokens are queued" in finish.error.message


def test_after_a_preemption_all_tokens_are_to_be_computed() -> None:
    engine = DrivenScheduler(num_blocks=6)
    engine.add(make_request(1, range(8), max_tokens=1))
    engine.run()
    engine.add(make_request(2, 8), make_request(3, range(8)))
    assert engine.scheduler.stats().num_waiting_tokens == 8 + 4
    while not engine.scheduler.waiting.has_preempted:
        engine.step()
    assert engine.scheduler.stats().num_waiting_tokens == engine.scheduler.requests[request_key(3)].num_tokens > 8
    engine.run()


def test_resumed_tokens_are_not_counted_as_generated() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, 5, max_tokens=4, output_token_ids=[100, 101]))
    assert engine.run() == {1: [102, 103]}
    assert engine.scheduler.stats().num_generation_tokens == 2


def test_same_calls_give_the_same_steps() -> None:
    def run() -> list[dict[int, int]]:
        engine = DrivenScheduler(num_blocks=12, max_num_batched_tokens=7)
        for handle in range(8):
            engine.add(make_request(handle, range(3 + handle), max_tokens=6))
        engine.run()
        return engine.scheduled

    assert run() == run()


def num_request_objects() -> int:
    return sum(type(found) is Request for found in gc.get_objects())


@pytest.mark.regression(20)
def test_thousand_requests_leave_no_request_behind_without_the_collector() -> None:
    """A reference cycle would keep each one until a full collection, which a serving engine never runs."""
    engine = DrivenScheduler(num_blocks=40, max_num_seqs=16, max_num_batched_tokens=64, max_queued_requests=1000)
    gc.collect()
    num_before = num_request_objects()
    gc.disable()
    try:
        for handle in range(1000):
            engine.add(make_request(handle, range(handle % 13 + 1), max_tokens=handle % 5 + 1, deadline=1e9))
        assert num_request_objects() == num_before + 1000
        engine.abort(*range(0, 1000, 7))
        engine.run()
        assert num_request_objects() == num_before
    finally:
        gc.enable()


def test_self_check_sees_a_wrong_sum_of_queued_tokens() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, 3))
    assert engine.scheduler.check_integrity() == []
    engine.scheduler.waiting.num_uncached_tokens += 1
    assert "not cached" in " ".join(engine.scheduler.check_integrity())


def test_self_check_sees_a_lost_request() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, 3))
    engine.step()
    assert engine.scheduler.check_integrity() == []
    engine.scheduler.running.clear()
    assert engine.scheduler.check_integrity() != []
