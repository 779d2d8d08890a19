"""Outboxes: order, merging, the end, and what happens to a session nobody reads."""

from __future__ import annotations

import threading

import pytest

from engine_core.messages import DeathCause, EngineCoreDead, Pong
from engine_core.output_queue import BATCHES, OutputQueue, coalesce
from engine_core.scheduler.output import (
    EngineCoreOutput,
    EngineCoreOutputs,
    Finish,
    FinishReason,
    PrefillStats,
    SchedulerStats,
)
from engine_core.scheduler.request import EventType
from fakes.fake_logprobs import fake_rows

ONE_RUNS, TWO_RUN = SchedulerStats(num_running=1), SchedulerStats(num_running=2)
DEAD = EngineCoreDead(DeathCause.STEP_FAILED, "RuntimeError", "boom", 3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def output_queue(clock: Clock) -> OutputQueue:
    return OutputQueue(clock, max_bytes=1000, max_age_s=30.0)


def batch(step: int, *outputs: EngineCoreOutput, stats: SchedulerStats | None = None) -> EngineCoreOutputs:
    return EngineCoreOutputs(step, float(step), list(outputs), stats)


def tokens(handle: int, *token_ids: int, **fields: object) -> EngineCoreOutput:
    return EngineCoreOutput(("s", handle), list(token_ids), **fields)  # type: ignore[arg-type]


def test_what_waits_is_merged_for_each_request_and_nothing_is_lost() -> None:
    finish = Finish(FinishReason.LENGTH)
    merged, pong = coalesce(
        [
            batch(
                1, tokens(1, 10, events=[(EventType.QUEUED, 0.0)]), tokens(2, 20), stats=SchedulerStats(num_running=1)
            ),
            Pong(1, False, 0),
            batch(2, tokens(1, 11, prefill=PrefillStats(3, 0)), stats=TWO_RUN),
            batch(3, tokens(1, 12, finish=finish, events=[(EventType.FIRST_TOKEN, 1.0)]), tokens(3, 30)),
        ]
    )
    assert isinstance(merged, EngineCoreOutputs)
    assert pong == Pong(1, False, 0)
    assert (merged.step, merged.time, merged.stats) == (3, 3.0, TWO_RUN)
    assert [(output.key[1], output.new_token_ids) for output in merged.outputs] == [
        (1, [10, 11, 12]),
        (2, [20]),
        (3, [30]),
    ]
    first = merged.outputs[0]
    assert first.events == [(EventType.QUEUED, 0.0), (EventType.FIRST_TOKEN, 1.0)]
    assert (first.prefill, first.finish) == (PrefillStats(3, 0), finish)


def test_rows_of_a_request_are_joined_in_order() -> None:
    prompt = [fake_rows([1, 2, 3], 1, 2), fake_rows([4], 4, 2)]
    [merged] = coalesce(
        [
            batch(1, tokens(1, prompt_logprobs=prompt[0])),
            batch(2, tokens(1, 10, prompt_logprobs=prompt[1], logprobs=fake_rows([10], 5, 1))),
            batch(3, tokens(1, 11, logprobs=fake_rows([11], 6, 1)), tokens(2, 20)),
        ]
    )
    assert isinstance(merged, EngineCoreOutputs)
    first, second = merged.outputs
    assert (first.new_token_ids, first.logprobs) == ([10, 11], fake_rows([10, 11], 5, 1))
    assert first.prompt_logprobs == fake_rows([1, 2, 3, 4], 1, 2)
    assert (second.logprobs, second.prompt_logprobs) == (None, None)


def test_rows_count_towards_the_limit_of_a_session(output_queue: OutputQueue) -> None:
    output_queue.attach("s")
    output_queue.put("s", batch(1, tokens(1, prompt_logprobs=fake_rows([1], 1, 100))))
    assert output_queue.too_far_behind() == []
    output_queue.put("s", batch(2, tokens(1, 5, logprobs=fake_rows([5], 1, 30))))
    assert output_queue.too_far_behind() == ["s"]


def test_one_batch_is_passed_on_as_it_is() -> None:
    only = batch(1, tokens(1, 10))
    assert coalesce([only]) == [only]


def test_steps_that_go_out_together_are_counted_and_news_of_the_queue_are_not(output_queue: OutputQueue) -> None:
    outbox = output_queue.attach("s")
    queued = EngineCoreOutput(("s", 2), events=[(EventType.QUEUED, 0.0)])
    for message in (batch(1, tokens(1, 10)), batch(1, queued), batch(1, stats=ONE_RUNS)):
        output_queue.put("s", message)
    assert outbox.take()
    assert output_queue.coalesced.snapshot() == {BATCHES: 0}
    for message in (batch(2, tokens(1, 11)), batch(2, queued), batch(3, tokens(1, 12)), batch(4, tokens(1, 13))):
        output_queue.put("s", message)
    assert outbox.take()
    assert output_queue.coalesced.snapshot() == {BATCHES: 2}


def test_the_death_is_the_last_message_whatever_is_put_meanwhile(output_queue: OutputQueue) -> None:
    outbox = output_queue.attach("s")
    output_queue.put("s", batch(1, tokens(1, 10)))
    output_queue.put_dead(DEAD)
    output_queue.put("s", Pong(1, False, 0))
    taken = outbox.take()
    assert taken is not None
    assert taken[-1] == DEAD
    assert len(taken) == 2
    assert outbox.take() is None


def test_a_pong_waits_behind_no_output(output_queue: OutputQueue) -> None:
    outbox = output_queue.attach("s")
    output_queue.put("s", batch(1, tokens(1, 10)))
    for nonce in (1, 2):
        output_queue.put("s", Pong(nonce, nonce == 2, 0))
    output_queue.put_dead(DEAD)
    assert outbox.take() == [Pong(1, False, 0), Pong(2, True, 0), batch(1, tokens(1, 10)), DEAD]


def test_a_session_that_attaches_after_the_death_is_told_too(output_queue: OutputQueue) -> None:
    output_queue.put_dead(DEAD)
    outbox = output_queue.attach("late")
    assert outbox.take() == [DEAD]
    assert outbox.take() is None


def test_many_threads_lose_nothing_and_the_last_message_stays_the_last(output_queue: OutputQueue) -> None:
    outbox = output_queue.attach("s")
    taken: list[object] = []

    def read() -> None:
        while (messages := outbox.take()) is not None:
            taken.extend(messages)

    def write(first: int) -> None:
        for nonce in range(first, first + 500):
            output_queue.put("s", Pong(nonce, False, 0))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(1000 * number,)) for number in range(3)]
    for thread in (reader, *writers):
        thread.start()
    for writer in writers:
        writer.join(30)
    output_queue.put_dead(DEAD)
    output_queue.put("s", Pong(1, False, 0))
    reader.join(30)
    assert taken[-1] == DEAD
    nonces = [pong.nonce for pong in taken[:-1] if isinstance(pong, Pong)]
    assert sorted(nonces) == [first + number for first in (0, 1000, 2000) for number in range(500)]
    assert [nonce for nonce in nonces if nonce < 1000] == list(range(500))


def test_what_is_discarded_while_it_is_taken_ends_the_stream(output_queue: OutputQueue) -> None:
    outbox = output_queue.attach("s")
    output_queue.put("s", Pong(1, False, 0))
    outbox.end(discard=True)
    output_queue.put("s", Pong(2, False, 0))
    assert outbox.take() is None
    assert outbox.take() is None
    assert output_queue.too_far_behind() == ["s"]


def test_the_loop_waits_for_no_lock_to_hand_its_outputs_over(output_queue: OutputQueue) -> None:
    outbox = output_queue.attach("s")
    with output_queue._lock:
        output_queue.put("s", Pong(1, False, 0))
        output_queue.put_all(Pong(2, False, 0))
    assert outbox.take() == [Pong(1, False, 0), Pong(2, False, 0)]


def test_take_waits_for_a_message(output_queue: OutputQueue) -> None:
    outbox = output_queue.attach("s")
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.append(outbox.take()))
    thread.start()
    output_queue.put("s", Pong(1, False, 0))
    thread.join(30)
    assert taken == [[Pong(1, False, 0)]]


def test_a_detached_or_unknown_session_gets_nothing(output_queue: OutputQueue) -> None:
    outbox = output_queue.attach("s")
    output_queue.detach("s", outbox)
    output_queue.put("s", Pong(1, False, 0))
    assert len(outbox) == 0


def test_detaching_an_old_outbox_leaves_the_new_one(output_queue: OutputQueue) -> None:
    old = output_queue.attach("s")
    new = output_queue.attach("s")
    output_queue.detach("s", old)
    output_queue.put("s", Pong(1, False, 0))
    assert (len(old), len(new)) == (0, 1)


def test_a_session_is_too_far_behind_by_bytes(output_queue: OutputQueue) -> None:
    output_queue.attach("s")
    output_queue.put("s", batch(1, tokens(1, *range(100))))
    assert output_queue.too_far_behind() == []
    output_queue.put("s", batch(2, tokens(1, *range(200))))
    assert output_queue.too_far_behind() == ["s"]


def test_each_output_is_looked_at_once_however_often_it_is_asked(
    output_queue: OutputQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []

    def size_of_all(outputs: list[EngineCoreOutput]) -> int:
        looked_at.append(outputs[0].key[1])
        return 100 * len(outputs)

    monkeypatch.setattr("engine_core.output_queue.size_of_all", size_of_all)
    outbox = output_queue.attach("s")
    for handle in range(4):
        output_queue.put("s", batch(handle, tokens(handle, 10)))
        assert output_queue.too_far_behind() == output_queue.too_far_behind() == []
    assert looked_at == [0, 1, 2, 3]
    outbox.take()
    output_queue.put("s", batch(4, tokens(4, 10)))
    output_queue.put("s", batch(5, *(tokens(5, 10) for _ in range(9))))
    assert output_queue.too_far_behind() == ["s"]


@pytest.mark.parametrize("is_taken", [True, False])
def test_what_comes_behind_the_end_does_not_wait(output_queue: OutputQueue, clock: Clock, is_taken: bool) -> None:
    taken: list[object] = []

    class EndingClock(Clock):
        """Asked by a `put` that has looked whether the outbox has ended, and found that it has not."""

        def __call__(self) -> float:
            if not outbox._is_ended:
                outbox.end()
                taken.extend([outbox.take()] if is_taken else [])
            return clock()

    outbox = output_queue.attach("s")
    outbox._clock = EndingClock()
    output_queue.put("s", Pong(1, False, 0))
    assert [*taken, outbox.take()][0] is None
    assert len(outbox) == 0
    clock.now = 100.0
    assert output_queue.too_far_behind() == []


def test_a_session_is_too_far_behind_by_time_since_the_first_unread_message(
    output_queue: OutputQueue, clock: Clock
) -> None:
    outbox = output_queue.attach("s")
    clock.now = 100.0
    assert output_queue.too_far_behind() == []
    output_queue.put("s", Pong(1, False, 0))
    clock.now = 130.0
    assert output_queue.too_far_behind() == []
    clock.now = 130.1
    assert output_queue.too_far_behind() == ["s"]
    outbox.take()
    assert output_queue.too_far_behind() == []


def test_whoever_takes_frame_by_frame_makes_progress(output_queue: OutputQueue, clock: Clock) -> None:
    outbox = output_queue.attach("s")
    output_queue.put("s", batch(1, tokens(1, *range(100))))
    outbox.take()
    output_queue.put("s", batch(2, tokens(1, *range(100))))
    for _ in range(4):
        clock.now += 10.0
        outbox.note_written()
        assert output_queue.too_far_behind() == []
    clock.now += 30.1
    assert output_queue.too_far_behind() == ["s"]


def test_discarding_frees_the_memory_and_ends(output_queue: OutputQueue) -> None:
    outbox = output_queue.attach("s")
    output_queue.put("s", batch(1, tokens(1, *range(100))))
    outbox.end(discard=True)
    assert outbox.take() is None


def test_wait_written_waits_for_every_stream(output_queue: OutputQueue) -> None:
    outboxes = [output_queue.attach(name) for name in "ab"]
    output_queue.end_all()
    outboxes[0].close()
    assert not output_queue.wait_written(0.0)
    outboxes[1].close()
    assert output_queue.wait_written(0.0)
