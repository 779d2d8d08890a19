"""What the scheduler notes of a request's life, under a clock that the test moves."""

from __future__ import annotations

from engine_core import operations as op
from engine_core.messages import Add
from engine_core.operations import PauseMode
from fakes.looped_engine import SESSION, LoopedEngine
from fakes.request_factory import make_request
from fakes.request_storm import RequestStorm, StormShape


def counts(engine: LoopedEngine) -> dict[str, tuple[int, float]]:
    """Number and sum of what was observed."""
    times = engine.scheduler.counters.times
    names = ("queue", "prefill", "decode", "inference", "computed_tokens", "preemptions")
    return {name: (getattr(times, name).count, getattr(times, name).total) for name in names}


def test_the_intervals_of_a_request_are_those_of_the_engines_clock() -> None:
    engine = LoopedEngine(max_num_batched_tokens=8, max_num_seqs=8)
    engine.call(op.Pause(PauseMode.KEEP))
    engine.now = 10
    engine.add(1, num_prompt=12, max_tokens=3)
    engine.turn()
    engine.now = 14
    engine.send(op.Resume())
    # Taken up at 14; its prompt is computed in two steps, of which the second brings a token.
    for engine.now in (14, 15, 17, 18, 19):
        engine.turn()
    assert engine.finishes[1]
    found = counts(engine)
    assert found["queue"] == (1, 4)
    assert found["prefill"] == (1, 1)
    assert found["decode"] == (1, 3)
    assert found["inference"] == (1, 4)
    assert found["computed_tokens"] == (1, 12)
    assert found["preemptions"] == (1, 0)


def test_an_interval_counts_only_when_both_of_its_ends_were_reached() -> None:
    engine = LoopedEngine(max_num_batched_tokens=8, max_num_seqs=8)
    engine.add(1, num_prompt=30, max_tokens=3)
    engine.turn()
    engine.call(op.Pause(PauseMode.KEEP))
    engine.add(2)
    engine.proc.abort([(SESSION, 1), (SESSION, 2)], "requested")
    engine.turn()
    assert set(engine.finishes) == {1, 2}
    found = counts(engine)
    # The first was scheduled and had no token yet, the second waited.
    assert (found["queue"][0], found["prefill"][0], found["inference"][0]) == (1, 0, 0)
    assert found["preemptions"][0] == 2


def test_tokens_from_the_cache_are_no_computed_ones() -> None:
    engine = LoopedEngine()
    for handle in (1, 2):
        request = make_request(handle, [5] * 9, max_tokens=1)
        assert engine.proc.core.preprocess_add_request(request) is None
        engine.proc.input_queue.put(Add([request]))
        engine.run()
    stats = engine.scheduler.stats()
    # Blocks of four tokens.
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens) == (18, 8)
    assert stats.num_prompt_tokens - stats.num_cached_prompt_tokens == counts(engine)["computed_tokens"][1]


def test_in_a_storm_every_end_is_counted_once() -> None:
    shape = StormShape(2000, max_live=40, max_shared_tokens=32, max_tokens=24, abort_rate=0.2, deadline_rate=0.3)
    storm = RequestStorm(shape, seed=4, num_blocks=40, max_num_seqs=16, max_num_batched_tokens=64)
    storm.blow(2000)
    storm.settle()
    found, stats = counts(storm), storm.scheduler.stats()
    assert found["preemptions"] == (2000, storm.num_preemptions)
    assert stats.num_preemptions == storm.num_preemptions
    assert 0 < found["prefill"][0] == found["decode"][0] == found["inference"][0] < found["queue"][0] < 2000
    assert storm.scheduler.counters.errors == {reason: storm.ends[reason] for reason in ("DEADLINE", "QUEUE_TIMEOUT")}
    assert sum(storm.proc.core.num_aborted.snapshot().values()) == storm.ends["ABORTED"]
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
