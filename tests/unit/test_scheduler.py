"""Scheduler: what engine-semantics.md §6 says in words, one rule a test.

Sequences of steps with their exact plans are in tests/golden/scheduler, random ones in tests/property.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

from engine_core.scheduler.output import EngineCoreOutput, FinishReason, ModelRunnerOutput, NewRequestData
from engine_core.scheduler.request import EventType, Request, RequestStatus, SamplingParams, StopConditions
from engine_core.scheduler.scheduler import FINISH_REASONS, Scheduler
from fakes.request_factory import EOS, make_request, make_scheduler, request_key
from fakes.shadow_worker import ShadowWorker

ABORTED = RequestStatus.FINISHED_ABORTED


def token_100_plus_i(data: NewRequestData, token_ids: list[int]) -> int:
    return 100 + len(token_ids) - len(data.prompt_token_ids)


class Engine:
    """A scheduler with a shadow worker and a clock that the test moves."""

    def __init__(self, **arguments: Any) -> None:
        self.scheduler: Scheduler = make_scheduler(**arguments)
        self.worker = ShadowWorker(self.scheduler.kv_cache_manager.block_size, token_100_plus_i)
        self.now = 0.0
        self.scheduled: list[dict[int, int]] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            assert self.scheduler.add_request(request, self.now).finish is None

    def step(self) -> dict[int, EngineCoreOutput]:
        """One step; outputs by handle. What was scheduled is the last of `scheduled`."""
        step = self.scheduler.schedule(self.now)
        self.scheduled.append({key[1]: num_tokens for key, num_tokens in step.num_scheduled_tokens.items()})
        outputs = self.scheduler.update_from_output(step, self.worker.execute(step), self.now)
        assert self.scheduler.violations() == []
        return {output.key[1]: output for output in outputs}

    def run(self) -> dict[int, list[int]]:
        """Step until idle; the tokens of each handle."""
        tokens: dict[int, list[int]] = {}
        while self.scheduler.has_work:
            for handle, output in self.step().items():
                tokens.setdefault(handle, []).extend(output.new_token_ids)
        assert self.worker.requests == {}
        assert self.scheduler.stats().num_used_blocks == 0
        return tokens

    def abort(self, *handles: int) -> list[EngineCoreOutput]:
        return self.scheduler.finish_requests([request_key(handle) for handle in handles], ABORTED)


# -- configuration -----------------------------------------------------------------------------------------------------


def test_budget_below_max_num_seqs_is_a_configuration_error() -> None:
    make_scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) is below max_num_seqs \(4\)"):
        make_scheduler(max_num_seqs=4, max_num_batched_tokens=3)


def test_budget_below_max_model_len_without_chunking_is_a_configuration_error() -> None:
    make_scheduler(max_num_batched_tokens=20, max_model_len=20, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(19\) is below max_model_len"):
        make_scheduler(max_num_batched_tokens=19, max_model_len=20, enable_chunked_prefill=False)


def test_prompt_above_the_threshold_does_not_wait_for_ever_without_chunking() -> None:
    """The two knobs contradict each other: refused at start, or the prompt runs; never a head of line that stays."""
    try:
        engine = Engine(
            max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False, long_prefill_token_threshold=4
        )
    except ValueError:
        return
    engine.add(make_request(1, 10))
    engine.step()
    assert engine.scheduled == [{1: 10}]


# -- admission ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "reason"), [(6, None), (7, "KV_CAPACITY"), (10_000, "KV_CAPACITY")])
def test_request_that_can_never_fit_is_refused(max_tokens: int, reason: str | None) -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    output = scheduler.add_request(make_request(1, 10, max_tokens=max_tokens), 0.0)
    assert (output.finish and output.finish.error and output.finish.error.reason) == reason
    assert len(scheduler.requests) == (reason is None)


def test_refusal_is_final_and_says_what_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    request = make_request(1, 10, max_tokens=7)
    output = scheduler.add_request(request, 0.0)
    assert output.finish is not None
    assert output.finish.error is not None
    assert output.finish.reason is FinishReason.REJECTED
    assert not output.finish.error.retryable
    assert "17" in output.finish.error.message
    assert "16" in output.finish.error.message
    assert request.status is RequestStatus.FINISHED_REJECTED
    assert not scheduler.has_work
    assert scheduler.finish_requests([request.key], ABORTED) == []
    assert scheduler.stats().num_rejected == 1


def test_full_queue_asks_to_come_back() -> None:
    scheduler = make_scheduler(max_queued_requests=1)
    scheduler.add_request(make_request(1, 3), 0.0)
    finish = scheduler.add_request(make_request(2, 3), 0.0).finish
    assert finish is not None
    assert finish.error is not None
    assert (finish.reason, finish.error.reason) == (FinishReason.REJECTED, "QUEUE_FULL")
    assert finish.error.retryable
    assert finish.error.retry_after_ms > 0


def test_queue_is_limited_in_tokens_too() -> None:
    scheduler = make_scheduler(max_queued_tokens=10)
    reasons = []
    for handle, num_tokens in enumerate([6, 5, 4, 1]):
        finish = scheduler.add_request(make_request(handle, num_tokens), 0.0).finish
        reasons.append(finish and finish.error and finish.error.reason)
    assert reasons == [None, "QUEUE_FULL", None, "QUEUE_FULL"]


def test_queued_event_carries_the_time() -> None:
    output = make_scheduler().add_request(make_request(1, 3), 7.5)
    assert output.events == [(EventType.QUEUED, 7.5)]


def test_nobody_takes_the_place_of_a_request_just_preempted() -> None:
    engine = Engine(num_blocks=6, block_size=1, max_num_seqs=4, enable_caching=False)
    engine.add(make_request(1, 2, max_tokens=3), make_request(2, 3, max_tokens=2))
    engine.step()
    # It would fit into what request 2 gives up.
    engine.add(make_request(3, 1, max_tokens=1))
    engine.step()
    assert engine.scheduled[-1] == {1: 1}
    assert [request.key[1] for request in engine.scheduler.waiting] == [2, 3]


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_partial_prefill_has_no_news() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.add(make_request(1, 10))
    assert [set(engine.step()) for _ in range(3)] == [set(), set(), {1}]


def test_first_output_tells_of_the_prefill_and_later_ones_are_plain() -> None:
    engine = Engine()
    engine.add(make_request(1, range(9), max_tokens=1))
    engine.run()
    engine.now = 3.0
    engine.add(make_request(2, range(9), max_tokens=3))
    first = engine.step()[2]
    assert first.prefill is not None
    assert (first.prefill.num_prompt_tokens, first.prefill.num_cached_tokens) == (9, 8)
    assert first.events == [(EventType.SCHEDULED, 3.0), (EventType.FIRST_TOKEN, 3.0)]
    assert not first.is_plain_token
    assert engine.step()[2].is_plain_token


def test_prefill_never_tells_of_more_cached_prompt_than_there_is_prompt() -> None:
    """A resumed generation may hit blocks of its own output; those are no prompt tokens."""
    engine = Engine()
    engine.add(make_request(1, range(6), max_tokens=9))
    for _ in range(8):
        engine.step()
    engine.abort(1)
    engine.add(make_request(2, range(6), max_tokens=9, output_token_ids=[100 + index for index in range(7)]))
    prefill = engine.step()[2].prefill
    assert prefill is not None
    assert prefill.num_prompt_tokens == 6
    assert prefill.num_cached_tokens == 6


def test_prefill_of_a_preempted_request_is_that_of_its_first_schedule() -> None:
    """Preempted before its first token: what it finds again of itself was not there when it came."""
    engine = Engine(num_blocks=8, block_size=1, long_prefill_token_threshold=2)
    engine.add(make_request(1, 2, max_tokens=3), make_request(2, 5, max_tokens=1))
    for _ in range(3):
        assert 2 not in engine.step()
    output = engine.step()[2]
    assert EventType.RESUMED in [event for event, _ in output.events]
    assert engine.scheduler.stats().preempted_hit_tokens > 0
    assert output.prefill is not None
    assert (output.prefill.num_prompt_tokens, output.prefill.num_cached_tokens) == (5, 0)


def test_worker_gets_everything_of_a_new_request_once() -> None:
    sampling = SamplingParams(temperature=0.5, seed=11)
    stop = StopConditions(max_tokens=4, min_tokens=2, stop_token_ids=frozenset({8, 7}), eos_token_ids=frozenset({EOS}))
    scheduler = make_scheduler()
    request = make_request(1, 5, stop=stop, output_token_ids=[50])
    request.sampling = sampling
    scheduler.add_request(request, 0.0)
    [data] = scheduler.schedule(0.0).new_requests
    assert data.prompt_token_ids == request.prompt_token_ids
    assert data.output_token_ids == [50]
    assert data.sampling is sampling
    assert data.min_tokens == 2
    # eos is masked below min_tokens even when it is ignored as a stop.
    assert data.min_tokens_masked_ids == (EOS, 7, 8)
    assert (data.num_computed_tokens, len(data.block_ids)) == (0, 2)


def test_scheduler_output_is_a_value() -> None:
    """A worker may hold on to a step while the scheduler goes on."""
    scheduler = make_scheduler()
    request = make_request(1, 5, output_token_ids=[50])
    scheduler.add_request(request, 0.0)
    step = scheduler.schedule(0.0)
    scheduler.update_from_output(step, ModelRunnerOutput([request.key], [[51]]), 0.0)
    scheduler.finish_requests(None, ABORTED)
    assert step.new_requests[0].output_token_ids == [50]
    assert step.finished_keys == []


def test_request_without_new_tokens_is_skipped_and_does_not_stop_the_loop() -> None:
    """A worker that had no token to give for a request leaves nothing to compute for it."""
    scheduler = make_scheduler()
    for handle in (1, 2):
        scheduler.add_request(make_request(handle, 3), 0.0)
    step = scheduler.schedule(0.0)
    scheduler.update_from_output(step, ModelRunnerOutput([request_key(1), request_key(2)], [[], [100]]), 0.0)
    assert scheduler.schedule(0.0).num_scheduled_tokens == {request_key(2): 1}


def test_tokens_behind_a_stop_are_dropped() -> None:
    scheduler = make_scheduler()
    request = make_request(1, 3, max_tokens=9)
    scheduler.add_request(request, 0.0)
    step = scheduler.schedule(0.0)
    [output] = scheduler.update_from_output(step, ModelRunnerOutput([request.key], [[100, EOS, 101]]), 0.0)
    assert output.new_token_ids == [100, EOS]
    assert output.finish is not None
    assert output.finish.reason is FinishReason.STOP


def test_every_end_has_a_reason() -> None:
    assert set(FINISH_REASONS) == {status for status in RequestStatus if status.is_finished}
    assert set(FINISH_REASONS.values()) == set(FinishReason)


# -- preemption --------------------------------------------------------------------------------------------------------


def test_preempted_request_keeps_its_output_and_loses_its_blocks() -> None:
    engine = Engine(num_blocks=6, block_size=1, enable_caching=False)
    victim = make_request(2, 3, max_tokens=2)
    engine.add(make_request(1, 2, max_tokens=3), victim)
    engine.step()
    engine.step()
    assert victim.status is RequestStatus.PREEMPTED
    assert (victim.num_computed_tokens, victim.num_preemptions) == (0, 1)
    assert victim.output_token_ids == [100]
    assert engine.scheduler.kv_cache_manager.block_ids(victim.key) == []
    assert engine.run() == {1: [102], 2: [101]}


def test_number_of_preemptions_is_in_the_finish_and_in_the_stats() -> None:
    engine = Engine(num_blocks=6, block_size=1, enable_caching=False)
    engine.add(make_request(1, 2, max_tokens=3), make_request(2, 3, max_tokens=2))
    finishes = {}
    while engine.scheduler.has_work:
        finishes |= {handle: output.finish for handle, output in engine.step().items() if output.finish}
    assert {handle: finish.num_preemptions for handle, finish in finishes.items()} == {1: 0, 2: 1}
    assert engine.scheduler.stats().num_preemptions == 1


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [6, 7, 9, 13, 100])
def test_tokens_do_not_depend_on_the_size_of_the_cache(num_blocks: int, enable_caching: bool) -> None:
    engine = Engine(num_blocks=num_blocks, block_size=4, max_num_batched_tokens=8, enable_caching=enable_caching)
    for handle in range(6):
        engine.add(make_request(handle, [*range(5), *range(90 * handle, 90 * handle + 3)], max_tokens=10))
    assert engine.run() == {handle: list(range(100, 110)) for handle in range(6)}


# -- ends from outside -------------------------------------------------------------------------------------------------


def test_abort_of_the_only_request_reaches_the_worker_once_in_an_empty_step() -> None:
    engine = Engine()
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
    engine = Engine()
    engine.add(make_request(1, 3))
    assert len(engine.abort(1)) == 1
    assert not engine.scheduler.has_work
    engine.step()
    assert engine.worker.finished_keys == []


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
    engine = Engine()
    engine.add(make_request(1, 3))
    assert len(engine.abort(1, 1, 99)) == 1
    assert engine.abort(1, 99) == []
    assert engine.scheduler.finish_requests([], ABORTED) == []
    assert engine.scheduler.finish_requests(None, ABORTED) == []


def test_abort_of_nobody_is_not_an_abort_of_all() -> None:
    engine = Engine()
    engine.add(make_request(1, 3))
    assert engine.abort() == []
    assert len(engine.scheduler.requests) == 1


def test_blocks_of_an_aborted_request_serve_the_next_one_at_once() -> None:
    engine = Engine(num_blocks=4, block_size=4)
    engine.add(make_request(1, 11, max_tokens=1))
    engine.scheduler.schedule(0.0)
    engine.abort(1)
    engine.add(make_request(2, 11, max_tokens=1))
    assert engine.scheduler.schedule(0.0).num_scheduled_tokens == {request_key(2): 11}


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_expired_request_is_never_prefilled() -> None:
    engine = Engine()
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
    step = scheduler.schedule(5.0)
    assert scheduler.has_work
    assert len(scheduler.update_from_output(step, ModelRunnerOutput([], []), 5.0)) == 1
    assert not scheduler.has_work


def test_queue_deadline_is_over_with_the_first_schedule_even_after_a_preemption() -> None:
    engine = Engine(num_blocks=6, block_size=1, enable_caching=False)
    engine.add(make_request(1, 2, max_tokens=3), make_request(2, 3, max_tokens=2, queue_deadline=1.0))
    engine.step()
    engine.step()
    assert [request.key[1] for request in engine.scheduler.waiting] == [2]
    engine.now = 9.0
    assert engine.run()[2] == [101]


def test_deadline_of_an_ended_request_is_no_news() -> None:
    engine = Engine()
    engine.add(make_request(1, 3, max_tokens=1, deadline=5.0))
    engine.run()
    engine.now = 9.0
    assert engine.step() == {}


# -- prefix cache ------------------------------------------------------------------------------------------------------


def test_tenants_share_no_block() -> None:
    engine = Engine(num_blocks=33)
    for handle, salt in enumerate(["a", "b", ""]):
        engine.add(make_request(handle, range(12), cache_salt=salt))
    engine.step()
    engine.step()
    tables = [engine.scheduler.kv_cache_manager.block_ids(request_key(handle)) for handle in range(3)]
    assert len({block_id for table in tables for block_id in table}) == sum(map(len, tables)) > 0
    assert engine.scheduler.stats().prefix_hit_tokens == 0


def test_bypass_writes_the_cache_but_does_not_read_it() -> None:
    engine = Engine()
    engine.add(make_request(1, range(9), max_tokens=1, bypass_prefix_cache=True))
    engine.run()
    engine.add(make_request(2, range(9), max_tokens=1))
    engine.step()
    engine.add(make_request(3, range(9), max_tokens=1, bypass_prefix_cache=True))
    engine.step()
    assert engine.scheduled[-2:] == [{2: 1}, {3: 9}]


def test_output_of_one_turn_is_a_hit_in_the_next() -> None:
    engine = Engine()
    engine.add(make_request(1, range(6), max_tokens=7))
    [answer] = engine.run().values()
    engine.add(make_request(2, [*range(6), *answer, 5], max_tokens=1))
    engine.step()
    # 13 tokens were known at the end, and the last of them was never computed: 3 full blocks.
    assert engine.scheduled[-1] == {2: 2}


def test_lookups_after_a_preemption_are_counted_apart() -> None:
    engine = Engine(num_blocks=5, block_size=4)
    engine.add(make_request(1, 8, max_tokens=4), make_request(2, 8, max_tokens=4))
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (16, 0)
    # 8 prompt tokens and the one of output; one of its two full blocks was still there.
    assert (stats.preempted_query_tokens, stats.preempted_hit_tokens) == (9, 4)


# -- statistics and leftovers ------------------------------------------------------------------------------------------


def test_stats() -> None:
    engine = Engine(num_blocks=9, block_size=4, max_num_seqs=1)
    engine.add(make_request(1, 5, max_tokens=2), make_request(2, 7, arrival_time=1.5), make_request(3, 6))
    engine.step()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (1, 2, 13)
    assert (stats.num_used_blocks, stats.num_cached_blocks, stats.num_total_blocks) == (2, 0, 8)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (5, 1)
    assert stats.oldest_waiting_time == 1.5


def test_resumed_tokens_are_not_counted_as_generated() -> None:
    engine = Engine()
    engine.add(make_request(1, 5, max_tokens=4, output_token_ids=[100, 101]))
    assert engine.run() == {1: [102, 103]}
    assert engine.scheduler.stats().num_generation_tokens == 2


def test_same_calls_give_the_same_steps() -> None:
    def run() -> list[dict[int, int]]:
        engine = Engine(num_blocks=12, max_num_batched_tokens=7)
        for handle in range(8):
            engine.add(make_request(handle, range(3 + handle), max_tokens=6))
        engine.run()
        return engine.scheduled

    assert run() == run()


def num_request_objects() -> int:
    return sum(type(found) is Request for found in gc.get_objects())


def test_thousand_requests_leave_no_request_behind_without_the_collector() -> None:
    """A reference cycle would keep each one until a full collection, which a serving engine never runs."""
    engine = Engine(num_blocks=40, max_num_seqs=16, max_num_batched_tokens=64, max_queued_requests=1000)
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


def test_self_check_sees_a_lost_request() -> None:
    engine = Engine()
    engine.add(make_request(1, 3))
    engine.step()
    assert engine.scheduler.violations() == []
    engine.scheduler.running.clear()
    assert engine.scheduler.violations() != []
