"""Scheduling policies inside the scheduler: who runs, who is preempted, who is held, and the limit on partial prefills.

The orders themselves are in test_request_queue and test_fair_order, step by step plans in tests/golden/scheduler.
"""

from __future__ import annotations

import pytest

from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.pause_state import PauseState
from engine_core.scheduler.request import RequestStatus
from fakes.driven_scheduler import DrivenScheduler
from fakes.request_factory import make_request, request_key
from fakes.scripted_grammar import ScriptedGrammar


def handles(requests) -> list[int]:
    return [request.key[1] for request in requests]


def prioritized(**limits: object) -> DrivenScheduler:
    return DrivenScheduler(scheduling_policy="priority", **limits)


def test_priority_preempts_the_worst_and_not_the_last_admitted() -> None:
    engine = prioritized(num_blocks=6)
    engine.add(make_request(1, 8, priority=5, max_tokens=8))
    engine.step()
    engine.add(make_request(2, 7, priority=0, max_tokens=6))
    engine.step()
    assert handles(engine.scheduler.running) == [2, 1]
    engine.step()
    engine.step()
    assert handles(engine.scheduler.running) == [2]
    assert handles(engine.scheduler.waiting) == [1]
    tokens = engine.run()
    assert tokens[1][-1] == 107
    assert engine.scheduler.stats().num_preemptions == 1


def test_fcfs_preempts_the_last_whatever_priority_was_asked_for() -> None:
    engine = DrivenScheduler(num_blocks=5)
    engine.add(make_request(1, 8, priority=5), make_request(2, 7, priority=0, max_tokens=6))
    engine.step()
    engine.step()
    assert handles(engine.scheduler.waiting) == [2]


def test_equal_priorities_are_preempted_by_arrival() -> None:
    engine = prioritized(num_blocks=5)
    engine.add(make_request(1, 8, arrival_time=2.0), make_request(2, 7, arrival_time=1.0))
    engine.step()
    assert handles(engine.scheduler.running) == [2, 1]
    engine.step()
    assert handles(engine.scheduler.waiting) == [1]


def test_the_better_priority_gets_the_budget_first() -> None:
    engine = prioritized(max_num_batched_tokens=8, long_prefill_token_threshold=5)
    engine.add(make_request(1, 20, priority=1))
    engine.step()
    engine.add(make_request(2, 10, priority=0))
    engine.step()
    engine.step()
    assert engine.scheduled == [{1: 5}, {1: 5, 2: 3}, {2: 5, 1: 3}]


def test_a_pause_lets_preempted_requests_finish_and_holds_new_ones_of_a_better_priority() -> None:
    engine = prioritized(max_num_seqs=2, enable_caching=False)
    engine.add(make_request(1, 4, priority=5, max_tokens=2))
    engine.step()
    engine.scheduler.preempt_all(engine.now)
    engine.add(make_request(2, 4, priority=0))
    engine.scheduler.pause_state = PauseState.NEW
    assert engine.scheduler.has_work
    while engine.scheduler.has_work:
        engine.step()
    assert engine.scheduled[1:] == [{1: 5}, {}]
    assert handles(engine.scheduler.waiting) == [2]
    engine.scheduler.pause_state = PauseState.NONE
    assert set(engine.run()) == {2}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_grammar_that_becomes_ready_does_not_hide_a_preempted_request_from_a_pause(policy: str) -> None:
    engine, grammar = DrivenScheduler(scheduling_policy=policy, enable_caching=False), ScriptedGrammar()
    engine.add(make_request(1, 4, grammar=grammar), make_request(2, 4, max_tokens=2))
    engine.step()
    engine.scheduler.preempt_all(engine.now)
    grammar.is_ready = True
    engine.scheduler.grammar_done(request_key(1))
    engine.scheduler.pause_state = PauseState.NEW
    assert engine.scheduler.has_work
    engine.step()
    assert engine.scheduled == [{2: 4}, {2: 5}]
    assert handles(engine.scheduler.waiting) == [1]


def test_grammars_that_become_ready_in_any_order_are_served_in_order_of_priority() -> None:
    engine = prioritized(max_num_seqs=1)
    grammars = {handle: ScriptedGrammar() for handle in (1, 2, 3)}
    for handle, grammar in grammars.items():
        engine.add(make_request(handle, 4, priority=-handle, grammar=grammar, max_tokens=1))
    engine.step()
    assert {request.status for request in engine.scheduler.skipped_waiting} == {RequestStatus.WAITING_FOR_GRAMMAR}
    for handle in (2, 3, 1):
        grammars[handle].is_ready = True
        engine.scheduler.grammar_done(request_key(handle))
    engine.run()
    assert engine.scheduled[1:4] == [{3: 4}, {2: 4}, {1: 4}]


def test_classes_of_one_priority_take_turns_and_a_better_priority_goes_first() -> None:
    engine = prioritized(max_num_seqs=1, class_weights={"gold": 2})
    for handle in range(1, 7):
        engine.add(make_request(handle, 4, client_class="flood", max_tokens=1))
    for handle in range(7, 11):
        engine.add(make_request(handle, 4, client_class="gold", max_tokens=1, arrival_time=9.0))
    engine.add(make_request(11, 4, client_class="flood", priority=-1, max_tokens=1))
    engine.run()
    assert [next(iter(scheduled)) for scheduled in engine.scheduled[:10]] == [11, 7, 1, 8, 9, 2, 10, 3, 4, 5]


def test_a_class_can_not_buy_its_way_past_its_cap() -> None:
    engine = prioritized(max_num_seqs=1, best_priorities={"free": 0})
    engine.add(make_request(1, 4, client_class="free", priority=-100, max_tokens=1))
    engine.add(make_request(2, 4, client_class="gold", priority=-1, max_tokens=1))
    engine.run()
    assert engine.scheduled[:2] == [{2: 4}, {1: 4}]


def test_a_weight_below_one_is_a_configuration_error() -> None:
    with pytest.raises(ValueError, match="weight of client class 'free' is 0"):
        ClientClasses(weights={"free": 0})


def test_no_more_prompts_in_chunks_than_the_limit() -> None:
    engine = DrivenScheduler(max_num_partial_prefills=1, long_prefill_token_threshold=4, max_num_batched_tokens=16)
    engine.add(make_request(1, 9, max_tokens=1), make_request(2, 9, max_tokens=1))
    engine.run()
    # Without the limit both would begin in step 1. The rest of 1 fits step 3, and 2 may begin next to it.
    assert engine.scheduled[:6] == [{1: 4}, {1: 4}, {1: 1, 2: 4}, {2: 4}, {2: 1}, {}]


def test_a_prompt_that_fits_whole_is_no_partial_prefill() -> None:
    engine = DrivenScheduler(max_num_partial_prefills=1, long_prefill_token_threshold=4)
    engine.add(make_request(1, 9), make_request(2, 4), make_request(3, 5), make_request(4, 4))
    engine.step()
    # The line ends at 3, which would be the second in chunks; 4 does not overtake it.
    assert engine.scheduled == [{1: 4, 2: 4}]


def test_a_recompute_in_chunks_counts_as_well() -> None:
    engine = DrivenScheduler(
        max_num_partial_prefills=1, long_prefill_token_threshold=4, num_blocks=9, enable_caching=False
    )
    engine.add(make_request(1, 4, max_tokens=9), make_request(2, 4, max_tokens=9))
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt_all(engine.now)
    engine.step()
    assert engine.scheduled[-1] == {1: 4}


def test_prompts_take_small_parts_of_steps_that_decode_and_whole_steps_of_their_own() -> None:
    engine = DrivenScheduler(max_num_batched_tokens=64, num_blocks=100, prefill_tokens_beside_decodes=5)
    engine.add(make_request(1, 20, max_tokens=6), make_request(2, 20, max_tokens=6))
    engine.step()
    engine.add(make_request(3, 9), make_request(4, 7))
    for _ in range(4):
        engine.step()
    # The second prompt begins with what the first one leaves.
    assert engine.scheduled == [
        {1: 20, 2: 20},
        {1: 1, 2: 1, 3: 5},
        {1: 1, 2: 1, 3: 4, 4: 1},
        {1: 1, 2: 1, 3: 1, 4: 5},
        {1: 1, 2: 1, 3: 1, 4: 1},
    ]


def test_one_token_that_is_left_of_the_part_is_given_once() -> None:
    engine = DrivenScheduler(max_num_batched_tokens=64, num_blocks=100, max_num_seqs=8, prefill_tokens_beside_decodes=5)
    engine.add(*(make_request(number, 2, max_tokens=9) for number in (1, 2, 3, 4)))
    engine.step()
    engine.add(make_request(5, 4), *(make_request(number, 10) for number in (6, 7, 8)))
    engine.step()
    assert engine.scheduled[1] == {1: 1, 2: 1, 3: 1, 4: 1, 5: 4, 6: 1}
    assert len(engine.scheduler.waiting) == 2


def test_the_parts_grow_with_the_number_of_prompts_for_each_decode() -> None:
    engine = DrivenScheduler(max_num_batched_tokens=64, num_blocks=100, max_num_seqs=8, prefill_tokens_beside_decodes=5)
    engine.add(make_request(1, 20, max_tokens=9), make_request(2, 20, max_tokens=9))
    engine.step()
    # More of them than may run: those that can not be admitted are none.
    engine.add(*(make_request(number, 10) for number in range(3, 12)))
    engine.step()
    engine.step()
    assert engine.scheduled[1:] == [{1: 1, 2: 1, 3: 10, 4: 5}, {1: 1, 2: 1, 3: 1, 4: 5}]


@pytest.mark.parametrize(
    ("num_decodes", "num_prompts", "is_burst"), [(4, 8, True), (15, 8, True), (16, 8, False), (4, 7, False)]
)
def test_a_burst_of_prompts_takes_the_whole_step(num_decodes: int, num_prompts: int, is_burst: bool) -> None:
    engine = DrivenScheduler(
        max_num_batched_tokens=128, num_blocks=200, max_num_seqs=64, prefill_tokens_beside_decodes=5
    )
    engine.add(*(make_request(number, 2, max_tokens=9) for number in range(num_decodes)))
    engine.step()
    engine.add(*(make_request(100 + number, 10) for number in range(num_prompts)))
    engine.step()
    whole = num_prompts * 10
    assert (sum(engine.scheduled[1].values()) == num_decodes + whole) is is_burst


def test_decodes_have_their_tokens_in_a_burst_of_more_important_prompts() -> None:
    engine = DrivenScheduler(
        max_num_batched_tokens=32,
        num_blocks=200,
        max_num_seqs=32,
        prefill_tokens_beside_decodes=5,
        scheduling_policy="priority",
    )
    engine.add(make_request(1, 2, max_tokens=9, priority=1), make_request(2, 2, max_tokens=9, priority=1))
    engine.step()
    engine.add(make_request(3, 88), *(make_request(number, 5) for number in range(4, 12)))
    for _ in range(3):
        engine.step()
    assert engine.scheduled[1:4] == [{1: 1, 2: 1, 3: 30}, {1: 1, 2: 1, 3: 30}, {1: 1, 2: 1, 3: 28, 4: 2}]


def test_a_long_queue_is_no_burst() -> None:
    engine = DrivenScheduler(
        max_num_batched_tokens=32, num_blocks=400, max_num_seqs=32, prefill_tokens_beside_decodes=5
    )
    engine.add(*(make_request(number, 2, max_tokens=9) for number in range(4)))
    engine.step()
    # As many tokens as four steps have, and then one more.
    engine.add(*(make_request(10 + number, 16) for number in range(8)))
    engine.step()
    assert sum(engine.scheduled[1].values()) == 32
    longer = DrivenScheduler(
        max_num_batched_tokens=32, num_blocks=400, max_num_seqs=32, prefill_tokens_beside_decodes=5
    )
    longer.add(*(make_request(number, 2, max_tokens=9) for number in range(4)))
    longer.step()
    longer.add(make_request(10, 17), *(make_request(11 + number, 16) for number in range(7)))
    longer.step()
    assert sum(longer.scheduled[1].values()) == 4 + 5 * 2


def test_beside_more_decodes_than_the_part_has_tokens_it_has_as_many_as_they() -> None:
    engine = DrivenScheduler(max_num_batched_tokens=64, num_blocks=100, max_num_seqs=8, prefill_tokens_beside_decodes=2)
    engine.add(*(make_request(number, 2, max_tokens=9) for number in range(1, 6)))
    engine.step()
    engine.add(make_request(6, 9))
    engine.step()
    assert engine.scheduled[1][6] == 5


def test_without_chunks_prompts_are_not_cut_beside_decodes() -> None:
    engine = DrivenScheduler(
        max_num_batched_tokens=64, max_model_len=32, enable_chunked_prefill=False, prefill_tokens_beside_decodes=5
    )
    engine.add(make_request(1, 8, max_tokens=6))
    engine.step()
    engine.add(make_request(2, 9))
    engine.step()
    assert engine.scheduled[1] == {1: 1, 2: 9}
