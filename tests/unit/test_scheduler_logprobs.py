"""Log-probabilities in the scheduler: prompt rows over chunks and preemptions, and the prefix cache."""

from __future__ import annotations

import pytest

from engine_core.scheduler.logprobs import new_prompt_rows
from engine_core.scheduler.output import ModelRunnerOutput, PromptLogprobs
from engine_core.scheduler.request import LogprobsParams
from fakes.driven_scheduler import DrivenScheduler
from fakes.fake_logprobs import fake_rows
from fakes.request_factory import EOS, make_request, make_scheduler
from stepwire.errors import InvariantViolation
from stepwire.packed_logprobs import PackedLogprobs

ALL = LogprobsParams(num_output=1, num_prompt=2)
PROMPT = list(range(50, 70))


def test_each_chunk_brings_its_rows_and_a_partial_prefill_has_no_other_news() -> None:
    engine = DrivenScheduler(max_num_batched_tokens=8)
    engine.add(make_request(1, PROMPT, logprobs=ALL))
    first, second, third = (engine.step()[1] for _ in range(3))
    assert (first.new_token_ids, first.events, first.finish, first.logprobs) == ([], [], None, None)
    assert first.prompt_logprobs == fake_rows(PROMPT[1:9], 1, 2)
    assert second.prompt_logprobs == fake_rows(PROMPT[9:17], 9, 2)
    # The last prompt position is about the first output token.
    assert third.prompt_logprobs == fake_rows(PROMPT[17:], 17, 2)
    assert (third.new_token_ids, third.logprobs) == ([100], fake_rows([100], 20, 1))
    assert third.events


def test_a_request_that_does_not_ask_gets_none() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, PROMPT[:5]))
    output = engine.step()[1]
    assert (output.logprobs, output.prompt_logprobs) == (None, None)
    assert engine.step()[1].is_plain_token


def test_a_token_with_log_probabilities_is_not_plain() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, PROMPT[:5], logprobs=LogprobsParams(0)))
    engine.step()
    assert not engine.step()[1].is_plain_token


def test_a_prompt_of_one_token_has_no_rows() -> None:
    engine = DrivenScheduler()
    engine.add(make_request(1, PROMPT[:1], logprobs=ALL))
    assert engine.step()[1].prompt_logprobs is None


def test_preemption_during_prefill_neither_repeats_nor_loses_rows() -> None:
    engine = DrivenScheduler(num_blocks=10, block_size=4, max_num_batched_tokens=8)
    engine.add(make_request(1, 15, max_tokens=10), make_request(2, PROMPT, max_tokens=3, logprobs=ALL))
    rows: list[PackedLogprobs] = []
    preempted_at: list[int] = []
    while engine.scheduler.has_work:
        output = engine.step().get(2)
        if output is not None and output.prompt_logprobs is not None:
            rows.append(output.prompt_logprobs)
        request = next((one for one in engine.scheduler.waiting if one.key[1] == 2), None)
        if request is not None and request.num_preemptions and not preempted_at:
            preempted_at.append(request.num_prompt_logprobs)
    # It went in the middle of its prompt, or the test shows nothing.
    assert preempted_at
    assert 0 < preempted_at[0] < len(PROMPT) - 1
    assert PackedLogprobs.join(rows) == fake_rows(PROMPT[1:], 1, 2)


def test_the_prefix_cache_is_written_but_not_read() -> None:
    engine = DrivenScheduler(num_blocks=40, max_num_batched_tokens=32)
    engine.add(make_request(1, PROMPT, max_tokens=1, logprobs=ALL))
    engine.run()
    engine.add(make_request(2, PROMPT, max_tokens=1, logprobs=ALL))
    assert engine.step()[2].prompt_logprobs == fake_rows(PROMPT[1:], 1, 2)
    engine.run()
    engine.add(make_request(3, PROMPT, max_tokens=1))
    engine.step()
    assert [plan for plan in engine.scheduled if plan] == [{1: 20}, {2: 20}, {3: 4}]


def test_a_recompute_reads_the_cache_once_every_row_was_sent() -> None:
    request = make_request(1, PROMPT, logprobs=ALL)
    assert request.needs_whole_prompt
    new_prompt_rows(request, PromptLogprobs(0, fake_rows(PROMPT[1:19], 1, 2)))
    assert request.needs_whole_prompt
    new_prompt_rows(request, PromptLogprobs(18, fake_rows(PROMPT[19:], 19, 2)))
    assert not request.needs_whole_prompt


def test_output_rows_alone_do_not_keep_from_the_cache() -> None:
    assert not make_request(1, PROMPT, logprobs=LogprobsParams(5)).needs_whole_prompt


def test_overlapping_rows_are_cut_and_a_gap_is_a_broken_invariant() -> None:
    request = make_request(1, PROMPT, logprobs=ALL)
    assert new_prompt_rows(request, PromptLogprobs(0, fake_rows(PROMPT[1:9], 1, 2))) == fake_rows(PROMPT[1:9], 1, 2)
    assert new_prompt_rows(request, PromptLogprobs(0, fake_rows(PROMPT[1:5], 1, 2))) is None
    again = new_prompt_rows(request, PromptLogprobs(4, fake_rows(PROMPT[5:13], 5, 2)))
    assert again == fake_rows(PROMPT[9:13], 9, 2)
    with pytest.raises(InvariantViolation, match="prompt rows from 13 on, but 12 were sent"):
        new_prompt_rows(request, PromptLogprobs(13, fake_rows(PROMPT[14:], 14, 2)))


def test_rows_of_tokens_after_a_stop_are_dropped_with_them() -> None:
    scheduler = make_scheduler()
    request = make_request(1, PROMPT[:5], max_tokens=9, logprobs=LogprobsParams(1))
    scheduler.add_request(request, 0.0)
    step = scheduler.schedule(0.0)
    runner_output = ModelRunnerOutput([request.key], [[100, EOS, 102]])
    runner_output.logprobs[request.key] = fake_rows([100, EOS, 102], 5, 1)
    [output] = scheduler.update_from_output(step, runner_output, 0.0)
    assert output.new_token_ids == [100, EOS]
    assert output.logprobs == fake_rows([100, EOS], 5, 1)
