"""Scheduler: requests under a grammar wait aside, hold up nobody, and end alone."""

from __future__ import annotations

from engine_core.scheduler.output import EngineCoreOutput, FinishReason
from engine_core.scheduler.request import Request, RequestStatus, StopConditions
from engine_core.scheduler.request_error import RequestError
from fakes.driven_scheduler import DrivenScheduler
from fakes.request_factory import EOS, make_request, request_key
from fakes.scripted_grammar import ScriptedGrammar


def constrained(handle: int, grammar: ScriptedGrammar, prompt: int = 4, **fields: object) -> Request:
    return make_request(handle, prompt, grammar=grammar, **fields)


def reason_of(output: EngineCoreOutput) -> str:
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ERROR
    assert output.finish.error is not None
    return output.finish.error.reason


def compiled(engine: DrivenScheduler, handle: int, grammar: ScriptedGrammar) -> None:
    grammar.is_ready = True
    assert engine.scheduler.grammar_done(request_key(handle)) == []


def test_a_request_without_its_grammar_waits_aside_and_others_pass() -> None:
    engine, grammar = DrivenScheduler(), ScriptedGrammar()
    engine.add(constrained(1, grammar), make_request(2, 4))
    engine.step()
    assert engine.scheduled == [{2: 4}]
    assert engine.scheduler.requests[request_key(1)].status is RequestStatus.WAITING_FOR_GRAMMAR
    stats = engine.scheduler.stats()
    assert (stats.num_waiting, stats.num_waiting_deferred, stats.num_waiting_tokens) == (1, 1, 4)


def test_once_compiled_it_is_looked_at_before_those_that_came_later() -> None:
    engine, grammar = DrivenScheduler(max_num_seqs=1), ScriptedGrammar()
    engine.add(constrained(1, grammar), make_request(2, 4, max_tokens=1), make_request(3, 4, max_tokens=1))
    engine.step()
    compiled(engine, 1, grammar)
    engine.step()
    assert engine.scheduled == [{2: 4}, {1: 4}]


def test_a_grammar_compiled_before_its_turn_costs_no_wait() -> None:
    engine, grammar = DrivenScheduler(), ScriptedGrammar()
    engine.add(constrained(1, grammar))
    compiled(engine, 1, grammar)
    engine.step()
    assert engine.scheduled == [{1: 4}]


def test_blocked_means_that_only_a_grammar_or_a_deadline_helps() -> None:
    engine, grammar = DrivenScheduler(), ScriptedGrammar()
    assert not engine.scheduler.is_blocked(0)
    engine.add(constrained(1, grammar, deadline=9.0))
    assert not engine.scheduler.is_blocked(0), "it has not been looked at"
    engine.step()
    assert engine.scheduler.is_blocked(8.9)
    assert engine.scheduler.next_deadline == 9
    assert not engine.scheduler.is_blocked(9)
    engine.add(make_request(2, 4, max_tokens=1))
    assert not engine.scheduler.is_blocked(0)
    engine.step()
    assert not engine.scheduler.is_blocked(0), "the workers are to be told of an end"
    engine.step()
    assert engine.scheduler.is_blocked(0)


def test_deadlines_hold_while_the_grammar_is_compiled() -> None:
    engine = DrivenScheduler()
    engine.add(constrained(1, ScriptedGrammar(), queue_deadline=5.0), constrained(2, ScriptedGrammar(), deadline=6.0))
    assert engine.step() == {}
    engine.now = 6.0
    outputs = engine.step()
    assert {handle: reason_of(output) for handle, output in outputs.items()} == {1: "QUEUE_TIMEOUT", 2: "DEADLINE"}
    assert not engine.scheduler.requests


def test_an_abort_ends_it_and_a_late_grammar_is_ignored() -> None:
    engine, grammar = DrivenScheduler(), ScriptedGrammar()
    engine.add(constrained(1, grammar))
    engine.step()
    [output] = engine.abort(1)
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ABORTED
    compiled(engine, 1, grammar)
    assert not engine.scheduler.has_work


def test_a_grammar_that_failed_ends_its_request_wherever_it_waits() -> None:
    engine, aside, in_line = DrivenScheduler(max_num_seqs=1), ScriptedGrammar(), ScriptedGrammar()
    engine.add(constrained(1, aside), make_request(2, 4), constrained(3, in_line))
    engine.step()
    aside.error = in_line.error = RequestError("GRAMMAR_INVALID", "it is broken")
    for handle in (1, 3):
        [output] = engine.scheduler.grammar_done(request_key(handle))
        assert reason_of(output) == "GRAMMAR_INVALID"
        assert output.finish is not None
        assert output.finish.error is not None
        assert "it is broken" in output.finish.error.message
        assert not output.finish.error.retryable
    assert engine.run()[2][-1] == 103
    assert engine.scheduler.check_integrity() == []


def test_a_refused_token_ends_that_request_only_and_is_not_sent() -> None:
    engine, grammar = DrivenScheduler(), ScriptedGrammar(is_ready=True, allowed={100})
    engine.add(constrained(1, grammar), make_request(2, 4))
    engine.step()
    outputs = engine.step()
    assert reason_of(outputs[1]) == "GRAMMAR_VIOLATION"
    assert outputs[1].new_token_ids == []
    assert grammar.accepted == [100]
    assert engine.run()[2][-1] == 103


def test_the_end_of_the_grammar_is_the_end_whatever_the_stop_rules_say() -> None:
    stop = StopConditions(max_tokens=9, min_tokens=9, eos_token_ids=frozenset({EOS}), ignore_eos=True)
    engine, grammar = DrivenScheduler(), ScriptedGrammar(is_ready=True, end=101)
    engine.add(constrained(1, grammar, stop=stop))
    engine.step()
    output = engine.step()[1]
    assert output.new_token_ids == [101]
    assert output.finish is not None
    assert output.finish.reason is FinishReason.STOP


def test_a_stop_id_that_the_grammar_allows_stops_as_ever() -> None:
    stop = StopConditions(max_tokens=9, stop_token_ids=frozenset({101}))
    engine = DrivenScheduler()
    engine.add(constrained(1, ScriptedGrammar(is_ready=True), stop=stop))
    engine.step()
    finish = engine.step()[1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_token_id) == (FinishReason.STOP, 101)


def test_masks_are_asked_for_exactly_where_a_grammar_samples() -> None:
    engine = DrivenScheduler(max_num_batched_tokens=8)
    engine.add(constrained(1, ScriptedGrammar(is_ready=True), 6), constrained(2, ScriptedGrammar(is_ready=True), 6))
    engine.add(make_request(3, 2))
    first = engine.scheduler.schedule(0)
    assert (dict(first.num_scheduled_tokens), first.grammar_keys) == (
        {request_key(1): 6, request_key(2): 2},
        [request_key(1)],
    )
    engine.scheduler.update_from_output(first, engine.worker.execute(first), 0)
    second = engine.scheduler.schedule(0)
    assert set(second.num_scheduled_tokens) == {request_key(1), request_key(2), request_key(3)}
    assert second.grammar_keys == [request_key(1), request_key(2)]


def test_a_grammar_survives_preemption_and_sees_each_token_once() -> None:
    grammars = {handle: ScriptedGrammar(is_ready=True) for handle in (1, 2, 3)}
    engine = DrivenScheduler(num_blocks=8)
    engine.add(*(constrained(handle, grammar, 5, max_tokens=12) for handle, grammar in grammars.items()))
    tokens = engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    assert {handle: grammar.accepted for handle, grammar in grammars.items()} == tokens


def test_those_aside_count_against_the_limits_of_the_queue() -> None:
    engine = DrivenScheduler(max_queued_requests=2, max_queued_tokens=20)
    engine.add(constrained(1, ScriptedGrammar()))
    engine.step()
    too_many_tokens = engine.scheduler.add_request(make_request(2, 17), 0)
    assert too_many_tokens.finish is not None
    engine.add(make_request(3, 4))
    too_many = engine.scheduler.add_request(make_request(4, 1), 0)
    assert too_many.finish is not None
    assert too_many.finish.error is not None
    assert too_many.finish.error.reason == "QUEUE_FULL"
