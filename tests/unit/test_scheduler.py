"""Scheduler: what engine-semantics.md §6 says in words, one rule a test.

Sequences of steps with their exact plans are in tests/golden/scheduler, random ones in tests/property.
"""

from __future__ import annotations

import pytest

from engine_core.scheduler.output import FINISH_REASONS, FinishReason, ModelRunnerOutput
from engine_core.scheduler.request import FINISHED, EventType, RequestStatus, SamplingParams, StopConditions
from fakes.driven_scheduler import DrivenScheduler
from fakes.request_factory import EOS, make_request, make_scheduler, request_key

ABORTED = RequestStatus.FINISHED_ABORTED


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
        engine = DrivenScheduler(
            max_num_batched_tokens=32, max_model_len=32, enable_chunked_prefill=False, long_prefill_token_threshold=4
        )
    except ValueError:
        return
    engine.add(make_request(1, 10))
    engine.step()
    assert engine.scheduled == [{1: 10}]


# -- differences -------------------------------------------------------------------------------------------------------


def test_a_known_request_is_sent_again_only_with_new_blocks() -> None:
    engine = DrivenScheduler(block_size=4)
    engine.add(make_request(1, 6, max_tokens=8))
    engine.step()
    plans = []
    for _ in range(6):
        plans.append(engine.scheduler.schedule(0.0))
        engine.scheduler.update_from_output(plans[-1], engine.worker.execute(plans[-1]), 0.0)
    assert [list(plan.num_scheduled_tokens.values()) for plan in plans] == [[1]] * 6
    # Tokens 6 and 7 fill the second block, 8 to 11 the third.
    assert [len(plan.cached_requests) for plan in plans] == [0, 0, 1, 0, 0, 0]


# -- admission ---------------------------------------------------------------------------------------------------------


@pytest.mark.regression(12)
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


def test_queued_event_carries_the_time_and_what_is_ahead() -> None:
    scheduler = make_scheduler()
    first = scheduler.add_request(make_request(1, 3), 7.5)
    assert first.events == [(EventType.QUEUED, 7.5, {"position": 0, "waiting_tokens_ahead": 0})]
    scheduler.add_request(make_request(2, 4), 7.5)
    third = scheduler.add_request(make_request(3, 5), 8.5)
    assert third.events == [(EventType.QUEUED, 8.5, {"position": 2, "waiting_tokens_ahead": 7})]


def test_nobody_takes_the_place_of_a_request_just_preempted() -> None:
    engine = DrivenScheduler(num_blocks=6, block_size=1, max_num_seqs=4, enable_caching=False)
    engine.add(make_request(1, 2, max_tokens=3), make_request(2, 3, max_tokens=2))
    engine.step()
    # It would fit into what request 2 gives up.
    engine.add(make_request(3, 1, max_tokens=1))
    engine.step()
    assert engine.scheduled[-1] == {1: 1}
    assert [request.key[1] for request in engine.scheduler.waiting] == [2, 3]


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_partial_prefill_has_no_news() -> None:
    engine = DrivenScheduler(max_num_batched_tokens=4)
    engine.add(make_request(1, 10))
    assert [set(engine.step()) for _ in range(3)] == [set(), set(), {1}]


def test_first_output_tells_of_the_prefill_and_later_ones_are_plain() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, range(9), max_tokens=1))
    engine.run()
    engine.now = 3.0
    engine.add(make_request(2, range(9), max_tokens=3))
    first = engine.step()[2]
    assert first.prefill is not None
    assert (first.prefill.num_prompt_tokens, first.prefill.num_cached_tokens) == (9, 8)
    assert first.events == [
        # Step 1 was that of the first request, and step 2 told the workers of its end.
        (EventType.SCHEDULED, 3.0, {"step": 3, "cached_tokens": 8, "blocks": 3}),
        (EventType.FIRST_TOKEN, 3.0, {"step": 3}),
    ]
    assert not first.is_plain_token
    assert engine.step()[2].is_plain_token


def test_prefill_never_tells_of_more_cached_prompt_than_there_is_prompt() -> None:
    """A resumed generation may hit blocks of its own output; those are no prompt tokens."""
    engine = DrivenScheduler()
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
    engine = DrivenScheduler(num_blocks=8, block_size=1, long_prefill_token_threshold=2)
    engine.add(make_request(1, 2, max_tokens=3), make_request(2, 5, max_tokens=1))
    for _ in range(3):
        assert 2 not in engine.step()
    output = engine.step()[2]
    found = {event.type: event.facts for event in output.events}
    assert found[EventType.PREEMPTED]["computed_tokens_lost"] > found[EventType.RESUMED]["computed_tokens_lost"] >= 0
    assert 0 < found[EventType.PREEMPTED]["step"] < found[EventType.RESUMED]["step"]
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
    assert (data.num_computed_tokens, [len(ids) for ids in data.block_ids]) == (0, [2])


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
    """The token in flight is the last one of the first request: there is nothing to compute for it."""
    scheduler = make_scheduler()
    for handle, max_tokens in ((1, 1), (2, 2)):
        scheduler.add_request(make_request(handle, 3, max_tokens=max_tokens), 0.0)
    scheduler.schedule(0.0)
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
    assert set(FINISH_REASONS) == {status for status in RequestStatus if status in FINISHED}
    assert set(FINISH_REASONS.values()) == set(FinishReason)


# -- preemption --------------------------------------------------------------------------------------------------------


def test_preempted_request_keeps_its_output_and_loses_its_blocks() -> None:
    engine = DrivenScheduler(num_blocks=6, block_size=1, enable_caching=False)
    victim = make_request(2, 3, max_tokens=2)
    engine.add(make_request(1, 2, max_tokens=3), victim)
    engine.step()
    engine.step()
    assert victim.status is RequestStatus.PREEMPTED
    assert (victim.num_computed_tokens, victim.num_preemptions) == (0, 1)
    assert victim.output_token_ids == [100]
    assert engine.scheduler.kv_cache_manager.num_blocks(victim.key) == 0
    assert engine.run() == {1: [102], 2: [101]}


def test_number_of_preemptions_is_in_the_finish_and_in_the_stats() -> None:
    engine = DrivenScheduler(num_blocks=6, block_size=1, enable_caching=False)
    engine.add(make_request(1, 2, max_tokens=3), make_request(2, 3, max_tokens=2))
    finishes = {}
    while engine.scheduler.has_work:
        finishes |= {handle: output.finish for handle, output in engine.step().items() if output.finish}
    assert {handle: finish.num_preemptions for handle, finish in finishes.items()} == {1: 0, 2: 1}
    assert engine.scheduler.stats().num_preemptions == 1


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [6, 7, 9, 13, 100])
def test_tokens_do_not_depend_on_the_size_of_the_cache(num_blocks: int, enable_caching: bool) -> None:
    engine = DrivenScheduler(
        num_blocks=num_blocks, block_size=4, max_num_batched_tokens=8, enable_caching=enable_caching
    )
    for handle in range(6):
        engine.add(make_request(handle, [*range(5), *range(90 * handle, 90 * handle + 3)], max_tokens=10))
    assert engine.run() == {handle: list(range(100, 110)) for handle in range(6)}


@pytest.mark.parametrize("reserve_full_prompt", [True, False])
def test_a_prompt_is_admitted_when_all_of_it_fits_or_its_first_chunk(reserve_full_prompt: bool) -> None:
    scheduler = make_scheduler(
        num_blocks=6, block_size=4, max_num_batched_tokens=8, reserve_full_prompt=reserve_full_prompt
    )
    scheduler.add_request(make_request(1, 4), 0.0)
    # It needs all five blocks, and beside the first request four are free.
    assert scheduler.add_request(make_request(2, 19, max_tokens=1), 0.0).finish is None
    planned = scheduler.schedule(0.0).num_scheduled_tokens
    assert planned == ({request_key(1): 4} if reserve_full_prompt else {request_key(1): 4, request_key(2): 4})
