"""Pausing: what each mode holds back, when it is complete, what joins and what is refused."""

from __future__ import annotations

import pytest

from engine_core import operations as op
from engine_core.lifecycle import EngineState
from engine_core.operations import PauseMode
from engine_core.scheduler.output import FinishReason
from engine_core.scheduler.request import RequestKey
from engine_core.scheduler.request_error import RequestError
from fakes.fake_executor import next_token
from fakes.looped_engine import SESSION, LoopedEngine
from fakes.scripted_grammar import ScriptedGrammar


@pytest.fixture
def engine() -> LoopedEngine:
    return LoopedEngine(max_num_seqs=2, max_num_batched_tokens=64)


def expected(handle: int, num: int) -> list[int]:
    known = [10 + handle] * 6
    for _ in range(num):
        known.append(next_token(known))
    return known[6:]


def reason_of(outcome: object) -> str:
    assert isinstance(outcome, RequestError), outcome
    return outcome.reason


def test_keep_freezes_everything_and_resume_goes_on_with_the_same_tokens(engine: LoopedEngine) -> None:
    for handle in (1, 2, 3):
        engine.add(handle)
    engine.turn(2)
    assert engine.call(op.Pause(PauseMode.KEEP)) == op.PauseResult(num_aborted=0, num_held=3)
    assert engine.state is EngineState.PAUSED
    tokens = {handle: list(ids) for handle, ids in engine.tokens.items()}
    assert len(tokens[1]) == 2
    engine.turn(5)
    assert engine.tokens == tokens
    assert not engine.proc.core.has_work

    assert engine.call(op.Resume()) == op.ResumeResult(is_resumed=True)
    assert engine.state is EngineState.RUNNING
    engine.run()
    assert engine.tokens == {handle: expected(handle, 5) for handle in (1, 2, 3)}


def test_wait_finishes_what_runs_and_holds_what_waits_and_what_comes(engine: LoopedEngine) -> None:
    for handle in (1, 2, 3):
        engine.add(handle)
    engine.turn()
    call_id = engine.send(op.Pause(PauseMode.WAIT))
    engine.turn()
    engine.add(4)
    engine.turn()
    assert call_id not in engine.results
    assert engine.state is EngineState.RUNNING
    assert engine.call(op.IsPaused()) == op.IsPausedResult(PauseMode.WAIT, is_pending=True)
    engine.run()
    engine.turn()
    assert engine.results[call_id] == op.PauseResult(num_aborted=0, num_held=0)
    assert set(engine.finishes) == {1, 2}
    assert engine.state is EngineState.PAUSED
    assert engine.call(op.IsPaused()) == op.IsPausedResult(PauseMode.WAIT, is_pending=False)
    engine.call(op.Resume())
    engine.run()
    assert engine.tokens == {handle: expected(handle, 5) for handle in (1, 2, 3, 4)}


def test_wait_lets_a_preempted_request_finish_before_it_is_complete() -> None:
    # 8 blocks of 4 tokens: two requests of up to 24 tokens can not both run to their end.
    engine = LoopedEngine(num_blocks=9)
    for handle in (1, 2):
        engine.add(handle, max_tokens=18)
    engine.turn(2)
    call_id = engine.send(op.Pause(PauseMode.WAIT))
    while not engine.scheduler.waiting:
        engine.turn()
    assert call_id not in engine.results
    engine.add(3)
    engine.run()
    engine.turn()
    assert set(engine.finishes) == {1, 2}
    assert call_id in engine.results
    assert engine.tokens == {handle: expected(handle, 18) for handle in (1, 2)} | {3: []}


def test_abort_ends_all_and_delivers_the_outputs_before_it_is_complete(engine: LoopedEngine) -> None:
    for handle in (1, 2, 3):
        engine.add(handle)
    engine.turn(2)
    # Added and aborted in the same turn: its queued event goes out before its end.
    engine.add(4)
    call_id = engine.send(op.Pause(PauseMode.ABORT))
    engine.turn(3)
    assert engine.results[call_id] == op.PauseResult(num_aborted=4, num_held=0)
    assert {finish.reason for finish in engine.finishes.values()} == {FinishReason.ABORTED}
    assert len(engine.finishes) == 4
    # The workers have dropped their state: "idle" is more than "no request".
    assert engine.executor.num_known_requests == 0
    assert engine.scheduler.stats().num_used_blocks == 0
    engine.add(5)
    engine.turn(3)
    assert engine.tokens[5] == []
    engine.call(op.Resume())
    engine.run()
    assert engine.tokens[5] == expected(5, 5)


def test_an_equal_pause_joins_and_another_is_refused(engine: LoopedEngine) -> None:
    engine.add(1)
    engine.turn()
    first = engine.send(op.Pause(PauseMode.WAIT))
    second = engine.send(op.Pause(PauseMode.WAIT, clear_cache=True))
    other = engine.send(op.Pause(PauseMode.KEEP))
    resume = engine.send(op.Resume())
    engine.turn()
    assert reason_of(engine.results[other]) == reason_of(engine.results[resume]) == "PAUSE_PENDING"
    assert {first, second}.isdisjoint(engine.results)
    engine.run()
    engine.turn()
    assert engine.results[first] == engine.results[second]
    # One of the two asked for it.
    assert engine.scheduler.stats().num_cached_blocks == 0

    assert engine.call(op.Pause(PauseMode.WAIT)) == engine.results[first]
    assert reason_of(engine.call(op.Pause(PauseMode.ABORT))) == "ENGINE_PAUSED"


def test_clear_cache_forgets_the_blocks_of_frozen_requests_too(engine: LoopedEngine) -> None:
    engine.add(1, max_tokens=12)
    engine.turn(4)
    assert engine.scheduler.stats().num_used_blocks > 0
    engine.call(op.Pause(PauseMode.KEEP, clear_cache=True))
    stats = engine.scheduler.stats()
    assert (stats.num_used_blocks, stats.num_cached_blocks) == (0, 0)
    engine.call(op.Resume())
    engine.run()
    assert engine.tokens[1] == expected(1, 12)


def test_deadlines_run_while_paused(engine: LoopedEngine) -> None:
    engine.add(1, max_tokens=12, deadline=100.0)
    engine.turn(2)
    engine.call(op.Pause(PauseMode.KEEP))
    engine.add(2, queue_deadline=50.0)
    engine.turn()
    engine.now = 50.0
    engine.wait()
    assert {handle: finish.error.reason for handle, finish in engine.finishes.items()} == {2: "QUEUE_TIMEOUT"}
    engine.now = 100.0
    engine.wait()
    assert engine.finishes[1].error.reason == "DEADLINE"
    assert engine.executor.num_known_requests == 0
    assert engine.scheduler.stats().num_used_blocks == 0


def test_a_far_deadline_does_not_wake_an_idle_engine_nor_end_it(engine: LoopedEngine) -> None:
    engine.add(1, deadline=3.6e11)
    engine.run()
    # The entry of the ended request is still there: the loop waits, as long as a wait can last, and takes this.
    engine.add(2)
    engine.wait()
    engine.run()
    assert engine.finishes.keys() == {1, 2}


def test_a_grammar_that_fails_during_a_pause_ends_its_request(engine: LoopedEngine) -> None:
    engine.call(op.Pause(PauseMode.KEEP))
    grammar = ScriptedGrammar()
    engine.add(1, grammar=grammar)
    engine.turn()
    grammar.error = RequestError("GRAMMAR_INVALID", "broken")
    engine.proc.core.structured_output = DoneGrammars((SESSION, 1))
    engine.turn()
    assert engine.finishes[1].error is not None
    assert engine.finishes[1].error.reason == "GRAMMAR_INVALID"


class DoneGrammars:
    """In place of the manager: the compile of this request has just ended."""

    def __init__(self, key: RequestKey) -> None:
        self._done = [key]

    @property
    def has_done(self) -> bool:
        return bool(self._done)

    def take_done(self) -> list[RequestKey]:
        done, self._done = self._done, []
        return done


def test_adds_of_a_paused_engine_are_bounded_by_the_queue_limits() -> None:
    engine = LoopedEngine(max_queued_requests=2)
    engine.call(op.Pause(PauseMode.KEEP))
    for handle in (1, 2, 3):
        engine.add(handle)
    engine.turn()
    assert engine.finishes[3].error.reason == "QUEUE_FULL"
    assert set(engine.finishes) == {3}


def test_aborts_of_frozen_requests_free_their_blocks_at_once(engine: LoopedEngine) -> None:
    engine.add(1)
    engine.turn(2)
    engine.call(op.Pause(PauseMode.KEEP))
    engine.proc.abort([("session", 1)], "requested")
    engine.turn()
    assert engine.finishes[1].reason is FinishReason.ABORTED
    assert engine.scheduler.stats().num_used_blocks == 0
    assert engine.executor.num_known_requests == 0


def test_resume_of_a_running_engine_says_so(engine: LoopedEngine) -> None:
    assert engine.call(op.Resume()) == op.ResumeResult(is_resumed=False)
    assert engine.call(op.IsPaused()) == op.IsPausedResult(None, is_pending=False)


def test_a_shutdown_lets_the_frozen_requests_finish(engine: LoopedEngine) -> None:
    engine.add(1)
    engine.turn(2)
    engine.call(op.Pause(PauseMode.KEEP))
    engine.proc.request_shutdown(30.0, "test")
    engine.proc.run_busy_loop()
    engine._collect()
    assert engine.tokens[1] == expected(1, 5)
    assert engine.finishes[1].reason is FinishReason.LENGTH
    assert engine.state is EngineState.DRAINING


def test_a_pause_that_is_pending_at_a_shutdown_fails(engine: LoopedEngine) -> None:
    engine.add(1)
    engine.turn()
    call_id = engine.send(op.Pause(PauseMode.WAIT))
    engine.turn()
    engine.proc.request_shutdown(30.0, "test")
    engine.proc.run_busy_loop()
    engine._collect()
    assert reason_of(engine.results[call_id]) == "DRAINING"
    assert engine.finishes[1].reason is FinishReason.LENGTH
