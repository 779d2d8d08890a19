"""The mailbox of one request: order, merging, chunks, errors, and what a slow reader leaves behind."""

from __future__ import annotations

import asyncio

import pytest

from fakes.fake_logprobs import fake_rows
from frontend.generation_events import Admitted, ChoiceDelta, ChoiceFinished, FinishReason, PromptReady
from frontend.output_collector import OutputCollector
from frontend.request_stats import RequestStats
from stepwire.errors import RequestFailedError, UnavailableError


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(clock, num_choices=1, **options) -> OutputCollector:
    return OutputCollector(num_choices, RequestStats(3, 0.0), clock=clock, **options)


def end(choice: int, num_tokens: int = 1) -> ChoiceFinished:
    return ChoiceFinished(choice, FinishReason.LENGTH, None, num_tokens)


async def is_blocked(task: asyncio.Task) -> bool:
    """Whether the task still waits after everything that can run has run."""
    for _ in range(5):
        await asyncio.sleep(0)
    return not task.done()


async def test_admission_comes_first_and_holds_output_back(clock) -> None:
    collector = make(clock)
    collector.push(0, "a", [1], 1)
    reader = asyncio.create_task(collector.next())
    assert await is_blocked(reader)
    collector.admit()
    assert await reader == [Admitted(), ChoiceDelta(0, "a", (1,), 1)]


@pytest.mark.regression(18)
async def test_deltas_of_a_choice_merge_and_choices_do_not(clock) -> None:
    collector = make(clock, 2)
    collector.admit()
    assert await collector.next() == [Admitted()]
    collector.push(0, "a", [1], 1)
    collector.push(1, "x", [7], 1)
    collector.push(0, "b", [2, 3], 2)
    assert await collector.next() == [ChoiceDelta(0, "ab", (1, 2, 3), 3), ChoiceDelta(1, "x", (7,), 1)]


async def test_end_follows_the_last_delta_and_then_there_is_nothing(clock) -> None:
    collector = make(clock, 2)
    collector.admit()
    collector.push(1, "x", [], 1)
    collector.finish(end(1))
    assert await collector.next() == [Admitted(), ChoiceDelta(1, "x", (), 1), end(1)]
    assert not collector.is_done
    collector.finish(end(0))
    assert await collector.next() == [end(0)]
    assert collector.is_done
    assert await collector.next() == []


async def test_tokens_without_text_are_counted_with_the_next_delta(clock) -> None:
    collector = make(clock)
    collector.admit()
    await collector.next()
    collector.push(0, "", [], 2)
    reader = asyncio.create_task(collector.next())
    assert await is_blocked(reader)
    collector.push(0, "é", [], 1)
    assert await reader == [ChoiceDelta(0, "é", (), 3)]


async def test_an_error_replaces_everything_and_stays(clock) -> None:
    collector = make(clock)
    collector.admit()
    collector.push(0, "a", [1], 1)
    collector.fail(UnavailableError("gone"))
    collector.fail(RequestFailedError("later"))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="gone"):
            await collector.next()
    assert collector.unread_bytes == 0


async def test_readers_that_share_an_error_do_not_share_frames(clock) -> None:
    error = UnavailableError("gone", retry_after_ms=5)
    raised = []
    for collector in (make(clock), make(clock)):
        collector.fail(error)
        with pytest.raises(UnavailableError) as caught:
            await collector.next()
        raised.append(caught.value)
    assert error.__traceback__ is None
    assert raised[0] is not raised[1]
    assert [one.retry_after_ms for one in raised] == [5, 5]


async def test_an_error_wakes_the_reader(clock) -> None:
    collector = make(clock)
    reader = asyncio.create_task(collector.next())
    assert await is_blocked(reader)
    collector.fail(UnavailableError("gone"))
    with pytest.raises(UnavailableError):
        await reader


async def test_cancelled_reader_loses_nothing(clock) -> None:
    collector = make(clock)
    reader = asyncio.create_task(collector.next())
    assert await is_blocked(reader)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    collector.admit()
    assert await collector.next() == [Admitted()]


async def test_unread_output_is_measured(clock) -> None:
    collector = make(clock)
    collector.admit()
    assert (collector.unread_bytes, collector.oldest_unread_time) == (0, None)
    clock.now = 5.0
    collector.push(0, "é", [1, 2], 2)
    clock.now = 6.0
    collector.push(0, "ab", [], 1)
    assert (collector.unread_bytes, collector.oldest_unread_time) == (12, 5.0)
    await collector.next()
    assert (collector.unread_bytes, collector.oldest_unread_time) == (0, None)


async def test_a_waiting_reader_is_never_behind(clock) -> None:
    collector = make(clock, min_chunk_tokens=10)
    collector.admit()
    collector.push(0, "first", [1], 1)
    await collector.next()
    reader = asyncio.create_task(collector.next())
    assert await is_blocked(reader)
    collector.push(0, "held", [2], 1)
    assert await is_blocked(reader)
    assert collector.oldest_unread_time is None
    reader.cancel()


async def test_a_reader_is_busy_from_what_it_takes_until_it_comes_for_more(clock) -> None:
    collector = make(clock)
    reader = asyncio.create_task(collector.next())
    assert await is_blocked(reader)
    assert collector.busy_since is None
    clock.now = 5.0
    collector.admit()
    await reader
    assert collector.busy_since == 5.0
    collector.finish(end(0))
    clock.now = 6.0
    await collector.next()
    assert (collector.oldest_unread_time, collector.busy_since) == (None, 6.0)
    clock.now = 7.0
    # It may yet write the whole of its answer.
    assert await collector.next() == []
    assert collector.busy_since == 7.0


async def test_output_held_for_a_full_chunk_is_not_unread(clock) -> None:
    collector = make(clock, min_chunk_tokens=3)
    collector.admit()
    collector.push(0, "first", [1], 1)
    await collector.next()
    # The handler is not waiting: it writes the first chunk.
    for token_id in (2, 3):
        clock.now += 20.0
        collector.push(0, "held", [token_id], 1)
        assert collector.oldest_unread_time is None
    clock.now += 20.0
    collector.push(0, "full", [4], 1)
    clock.now += 1.0
    # Since it was full, not since it began.
    assert collector.oldest_unread_time == 60.0


async def test_a_chunk_is_unread_from_the_moment_it_is_old_enough(clock) -> None:
    collector = make(clock, min_chunk_tokens=100, max_chunk_delay_s=2.0)
    collector.admit()
    collector.push(0, "first", [1], 1)
    await collector.next()
    collector.push(0, "held", [2], 1)
    clock.now = 1.0
    assert collector.oldest_unread_time is None
    clock.now = 5.0
    assert collector.oldest_unread_time == 2.0
    collector.finish(end(0))
    assert collector.oldest_unread_time == 2.0


# --- chunks ---
async def test_chunks_hold_back_all_but_the_first_and_the_last(clock) -> None:
    collector = make(clock, min_chunk_tokens=3)
    collector.admit()
    collector.push(0, "a", [1], 1)
    assert await collector.next() == [Admitted(), ChoiceDelta(0, "a", (1,), 1)]
    reader = asyncio.create_task(collector.next())
    for token_id in (2, 3):
        collector.push(0, "b", [token_id], 1)
        assert await is_blocked(reader)
    collector.push(0, "b", [4], 1)
    assert await reader == [ChoiceDelta(0, "bbb", (2, 3, 4), 3)]
    collector.push(0, "c", [5], 1)
    collector.finish(end(0))
    assert await collector.next() == [ChoiceDelta(0, "c", (5,), 1), end(0)]


async def test_each_choice_has_its_own_chunks(clock) -> None:
    collector = make(clock, 2, min_chunk_tokens=2)
    collector.admit()
    collector.push(0, "a", [1], 1)
    await collector.next()
    collector.push(0, "a", [2], 1)
    collector.push(1, "x", [3], 1)
    assert await collector.next() == [ChoiceDelta(1, "x", (3,), 1)]
    collector.push(0, "a", [4], 1)
    assert await collector.next() == [ChoiceDelta(0, "aa", (2, 4), 2)]


async def test_a_chunk_that_is_old_enough_goes_with_the_next_look(clock) -> None:
    collector = make(clock, min_chunk_tokens=100, max_chunk_delay_s=2.0)
    collector.admit()
    collector.push(0, "a", [1], 1)
    await collector.next()
    collector.push(0, "b", [2], 1)
    clock.now = 2.0
    assert await collector.next() == [ChoiceDelta(0, "b", (2,), 1)]


async def test_the_delay_of_a_chunk_ends_without_further_tokens() -> None:
    collector = OutputCollector(1, RequestStats(3, 0.0), min_chunk_tokens=100, max_chunk_delay_s=0.001)
    collector.admit()
    collector.push(0, "a", [1], 1)
    await collector.next()
    collector.push(0, "b", [2], 1)
    assert await collector.next() == [ChoiceDelta(0, "b", (2,), 1)]


# --- log-probabilities ---
async def test_rows_merge_with_their_deltas_and_count_as_unread(clock) -> None:
    collector = make(clock)
    collector.admit()
    collector.push(0, "a", [1], 1, fake_rows([1], 0, 2))
    # A token whose text is hidden and whose id was not asked for.
    collector.push(0, "", [], 1, fake_rows([2], 1, 2))
    assert collector.unread_bytes == len("a") + 4 + fake_rows([1, 2], 0, 2).num_bytes
    assert await collector.next() == [Admitted(), ChoiceDelta(0, "a", (1,), 2, fake_rows([1, 2], 0, 2))]
    assert collector.unread_bytes == 0


async def test_the_prompt_comes_after_admission_and_before_output(clock) -> None:
    collector = make(clock)
    ready = PromptReady((fake_rows([5], 1, 0),), 0)
    collector.put_prompt(ready)
    collector.push(0, "a", [1], 1)
    reader = asyncio.create_task(collector.next())
    assert await is_blocked(reader)
    collector.admit()
    assert await reader == [Admitted(), ready, ChoiceDelta(0, "a", (1,), 1)]


async def test_the_prompt_alone_wakes_the_reader(clock) -> None:
    collector = make(clock)
    collector.admit()
    await collector.next()
    reader = asyncio.create_task(collector.next())
    assert await is_blocked(reader)
    collector.put_prompt(PromptReady((), 3))
    assert await reader == [PromptReady((), 3)]
