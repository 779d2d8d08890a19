"""The one loop over engine outputs: isolation, fairness, several choices, aborts, and maps that end up empty."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections import defaultdict

import pytest

from fakes.fake_logprobs import fake_rows
from fakes.small_tokenizer import byte_ids, byte_level_tokenizer
from fakes.text_requests import AbortLog, finish, make_request, queued, tokens
from frontend.abort_kind import AbortKind
from frontend.engine_outputs import EngineEvent, EngineFinish, EngineFinishReason, EngineOutput
from frontend.generation_events import Admitted, ChoiceDelta, ChoiceFinished, FinishReason, PromptReady, StopMatch
from frontend.output_processor import SLICE, OutputProcessor
from frontend.processing_failures import Stage
from stepwire.errors import EngineDeadError, InvalidRequestError, OverloadedError, RequestFailedError, UnavailableError
from stepwire.repeats import RepeatHandler

TOKENIZER = byte_level_tokenizer()
# Nothing can be told without decoding.
NO_PLAIN_TEXTS: dict[int, str] = defaultdict(str)
STOP, LENGTH, ABORTED = EngineFinishReason.STOP, EngineFinishReason.LENGTH, EngineFinishReason.ABORTED


def ids(text: str) -> list[int]:
    return byte_ids(text.encode())


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """A processor with what surrounds it."""

    def __init__(self, tokenizer=TOKENIZER) -> None:
        self.clock = Clock()
        self.aborts = AbortLog()
        self.failures: list[Stage] = []
        self.processor = OutputProcessor(tokenizer, self.aborts, self.failures.append, clock=self.clock)

    def add(self, *handles: int, **changes):
        request = make_request(num_choices=len(handles), arrival_time=self.clock.now, **changes)
        return self.processor.add_request(request, list(handles))

    @property
    def is_idle(self) -> bool:
        """Nothing is left in the processor's maps."""
        return (self.processor.num_requests, self.processor.num_choices) == (0, 0)

    async def take(self, *outputs: EngineOutput) -> None:
        await self.processor.process_outputs(outputs)


@pytest.fixture
def world() -> World:
    return World()


async def read_all(collector) -> list:
    """All items until the end, deltas of one choice joined."""
    items = []
    while batch := await collector.next():
        items += batch
    return items


def text_of(items, choice=0) -> str:
    return "".join(item.text for item in items if isinstance(item, ChoiceDelta) and item.choice == choice)


async def test_one_request_from_queue_to_end(world) -> None:
    collector = world.add(7)
    await world.take(queued(7), tokens(7, *ids("he")), finish(7, STOP, *ids("y"), 0))
    items = await read_all(collector)
    end = ChoiceFinished(0, FinishReason.STOP, StopMatch(eos_token_id=0), 4)
    assert items == [Admitted(), ChoiceDelta(0, "hey", tuple(ids("hey")), 3), end]
    assert world.processor.close(collector) == []
    assert world.is_idle
    assert world.aborts.calls == []


async def test_unknown_handles_are_skipped(world) -> None:
    await world.take(tokens(99, 5), finish(98, LENGTH, 5))
    assert world.is_idle


async def test_stop_string_aborts_in_the_engine_and_later_tokens_are_late(world) -> None:
    collector = world.add(7, stop_strings=("X",))
    await world.take(tokens(7, *ids("aX")), tokens(7, *ids("b")), finish(7, LENGTH, *ids("c")))
    items = await read_all(collector)
    assert text_of(items) == "a"
    assert items[-1].stop_match == StopMatch(stop_string="X")
    assert world.aborts.calls == [([7], AbortKind.STOP_STRING)]
    assert collector.usage.completion_tokens == 2
    assert world.processor.num_choices == 0


async def test_stop_string_in_the_last_output_needs_no_abort(world) -> None:
    collector = world.add(7, stop_strings=("X",))
    await world.take(finish(7, LENGTH, *ids("aX")))
    assert (await read_all(collector))[-1].reason is FinishReason.STOP
    assert world.aborts.calls == []


# --- isolation ---
class _PoisonedTokenizer:
    """Decodes like the real one, except that one id breaks it."""

    POISON = ids("~")[0]
    # Every token is decoded.
    plain_texts = NO_PLAIN_TEXTS

    def __getattr__(self, name: str):
        return getattr(TOKENIZER, name)

    def decode(self, token_ids, *, skip_special_tokens=True) -> str:
        if self.POISON in token_ids:
            raise RuntimeError("poisoned")
        return TOKENIZER.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.regression(13)
@pytest.mark.regression("output error fails one request")
async def test_one_poisoned_detokenizer_harms_no_other_of_a_hundred_streams() -> None:
    world = World(_PoisonedTokenizer())
    collectors = [world.add(handle) for handle in range(100)]
    await world.take(*(tokens(handle, *ids("a~" if handle == 42 else "ab")) for handle in range(100)))
    await world.take(*(finish(handle, LENGTH, *ids("c")) for handle in range(100)))
    for handle, collector in enumerate(collectors):
        if handle == 42:
            with pytest.raises(RequestFailedError) as caught:
                await collector.next()
            assert caught.value.reason == "OUTPUT_PROCESSING"
        else:
            assert text_of(await read_all(collector)) == "abc"
        assert world.processor.close(collector) == []
    assert world.aborts.calls == [([42], AbortKind.FRONTEND_ERROR)]
    assert world.failures == [Stage.DETOKENIZE]
    assert world.is_idle


async def test_the_log_has_the_first_failure_in_full_and_counts_those_like_it(caplog, monkeypatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(logging.getLogger("frontend.processing_failures"), "handlers", [RepeatHandler(written)])
    world = World(_PoisonedTokenizer())
    for handle in (1, 2, 3):
        world.add(handle, output={"num_logprobs": 1} if handle == 3 else {})
    await world.take(*(tokens(handle, *ids("~")) for handle in (1, 2, 3)))
    assert world.failures == [Stage.DETOKENIZE, Stage.DETOKENIZE, Stage.LOGPROBS]
    assert [record.stage for record in caplog.records] == ["detokenize", "detokenize", "logprobs"]
    assert written.getvalue().count("output processing failed\n") == written.getvalue().count("Traceback") == 2


async def test_failing_choice_takes_its_siblings_along(world) -> None:
    tokenizer = _PoisonedTokenizer()
    world = World(tokenizer)
    collector = world.add(1, 2, 3)
    await world.take(finish(1, LENGTH, *ids("a")), tokens(2, *ids("~")), tokens(3, *ids("a")))
    with pytest.raises(RequestFailedError):
        await collector.next()
    assert world.aborts.calls == [([2, 3], AbortKind.FRONTEND_ERROR)]


# --- engine failures ---
@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (EngineFinishReason.REJECTED, OverloadedError("queue full", retry_after_ms=10)),
        (EngineFinishReason.ERROR, InvalidRequestError("late", reason="DEADLINE")),
    ],
)
async def test_refusals_and_failures_end_the_whole_request(world, reason, error) -> None:
    collector = world.add(1, 2)
    await world.take(queued(1), EngineOutput(2, finish=EngineFinish(reason, error=error)))
    with pytest.raises(type(error)) as caught:
        await collector.next()
    assert (caught.value.reason, caught.value.message) == (error.reason, error.message)
    assert caught.value.retry_after_ms == error.retry_after_ms
    assert world.aborts.calls == [([1], AbortKind.REQUESTED)]
    assert world.processor.num_choices == 0


async def test_failure_without_a_reason_is_still_an_error(world) -> None:
    collector = world.add(1)
    await world.take(finish(1, EngineFinishReason.ERROR))
    with pytest.raises(RequestFailedError):
        await collector.next()


async def test_abort_that_nobody_asked_for_is_a_draining_engine(world) -> None:
    collector = world.add(1)
    await world.take(queued(1), finish(1, ABORTED))
    with pytest.raises(UnavailableError) as caught:
        await collector.next()
    assert caught.value.reason == "DRAINING"
    assert caught.value.retry_after_ms > 0


async def test_dead_engine_fails_its_requests_and_aborts_siblings_elsewhere(world) -> None:
    lost, split, other = world.add(1), world.add(2, 3), world.add(4)
    world.processor.fail([1, 2, 77], EngineDeadError("died"))
    for collector in (lost, split):
        with pytest.raises(EngineDeadError):
            await collector.next()
    assert world.aborts.calls == [([3], AbortKind.REQUESTED)]
    await world.take(finish(4, LENGTH, *ids("ok")))
    assert text_of(await read_all(other)) == "ok"


async def test_choice_that_had_ended_survives_the_engine(world) -> None:
    collector = world.add(1)
    await world.take(finish(1, LENGTH, *ids("ok")))
    world.processor.fail([1], EngineDeadError("died"))
    assert text_of(await read_all(collector)) == "ok"


# --- aborts ---
@pytest.mark.regression(18)
async def test_abort_call_ends_every_live_choice_as_cancelled(world) -> None:
    collector = world.add(1, 2)
    await world.take(finish(1, LENGTH, *ids("a")), tokens(2, *ids("b")))
    world.processor.abort(collector)
    # Asked for twice, it is done once.
    world.processor.abort(collector)
    assert world.aborts.calls == [([2], AbortKind.REQUESTED)]
    await world.take(finish(2, ABORTED))
    items = await read_all(collector)
    ends = {item.choice: item.reason for item in items if isinstance(item, ChoiceFinished)}
    assert ends == {0: FinishReason.LENGTH, 1: FinishReason.CANCELLED}
    assert text_of(items, 1) == "b"


async def test_abort_of_a_finished_request_does_nothing(world) -> None:
    collector = world.add(1)
    await world.take(finish(1, LENGTH, 5))
    world.processor.abort(collector)
    world.processor.close(collector)
    world.processor.abort(collector)
    assert world.aborts.calls == []


async def test_closing_returns_what_is_live_once(world) -> None:
    collector = world.add(1, 2, 3)
    await world.take(finish(2, LENGTH, 5))
    assert world.processor.close(collector) == [1, 3]
    assert world.processor.close(collector) == []
    assert world.is_idle
    await world.take(tokens(1, 5))


# --- several choices ---
@pytest.mark.regression(18)
async def test_four_choices_end_at_different_times(world) -> None:
    collector = world.add(1, 2, 3, 4, prompt_token_ids=ids("four"))
    await world.take(queued(1), queued(2), queued(3))
    first = asyncio.create_task(collector.next())
    await asyncio.sleep(0)
    assert not first.done()
    await world.take(queued(4))
    assert await first == [Admitted()]
    for step, handle in enumerate((3, 1, 4, 2)):
        await world.take(*(tokens(live, *ids("x")) for live in (3, 1, 4, 2)[step:]))
        await world.take(finish(handle, LENGTH, *ids(str(handle))))
    items = await read_all(collector)
    assert [text_of(items, choice) for choice in range(4)] == ["xx1", "xxxx2", "x3", "xxx4"]
    ends = [item.choice for item in items if isinstance(item, ChoiceFinished)]
    assert sorted(ends) == [0, 1, 2, 3]
    # The prompt once, ten and four tokens of output.
    assert (collector.usage.prompt_tokens, collector.usage.completion_tokens) == (4, 14)
    world.processor.close(collector)
    assert world.is_idle


class _CountingTokenizer:
    """Decodes like the real one, and counts how often."""

    def __init__(self) -> None:
        self.num_decodes = 0

    def __getattr__(self, name: str):
        return getattr(TOKENIZER, name)

    def decode(self, token_ids, *, skip_special_tokens=True) -> str:
        self.num_decodes += 1
        return TOKENIZER.decode(token_ids, skip_special_tokens=skip_special_tokens)


async def test_further_choices_do_not_read_the_prompt_again() -> None:
    tokenizer = _CountingTokenizer()
    world = World(tokenizer)
    prompt = ids("caf") + byte_ids("é".encode())[:1]
    world.add(1, prompt_token_ids=prompt)
    num_of_one, tokenizer.num_decodes = tokenizer.num_decodes, 0
    collector = world.add(*range(100, 600), prompt_token_ids=prompt)
    assert tokenizer.num_decodes == num_of_one > 0
    # Each goes its own way from the same place, here from within a character.
    rest = byte_ids("é".encode())[1:]
    await world.take(finish(100, LENGTH, *rest, *ids("a")), finish(101, LENGTH, *ids("b")), finish(102, LENGTH, *rest))
    for handle in range(103, 600):
        await world.take(finish(handle, LENGTH, *rest, *ids("z")))
    items = await read_all(collector)
    assert [text_of(items, choice) for choice in (0, 2, 3)] == ["éa", "é", "éz"]
    assert text_of(items, 1).endswith("b")


# --- counts and durations ---
async def test_usage_and_timings(world) -> None:
    collector = world.add(1, 2)
    world.clock.now += 0.5
    ms = 1_000_000
    await world.take(
        EngineOutput(1, events=((EngineEvent.QUEUED, 10 * ms),)),
        EngineOutput(2, events=((EngineEvent.QUEUED, 11 * ms),)),
        EngineOutput(
            1, (5,), None, ((EngineEvent.SCHEDULED, 30 * ms), (EngineEvent.FIRST_TOKEN, 70 * ms)), 16, 70 * ms
        ),
        EngineOutput(2, (5,), None, ((EngineEvent.SCHEDULED, 31 * ms),), 48, 71 * ms),
    )
    world.clock.now += 9
    await world.take(
        EngineOutput(1, (5,), EngineFinish(LENGTH, preemptions=2), monotonic_ns=80 * ms),
        EngineOutput(2, (5,), EngineFinish(LENGTH, preemptions=1), monotonic_ns=100 * ms),
    )
    await read_all(collector)
    usage, timings = collector.usage, collector.timings
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (1, 4, 16)
    assert (timings.queued_ns, timings.prefill_ns, timings.decode_ns) == (20 * ms, 40 * ms, 30 * ms)
    assert timings.ttft_ns == 500 * ms
    assert timings.preemptions == 3


async def test_slow_readers_are_found(world) -> None:
    idle, big, old = world.add(1), world.add(2), world.add(3)
    await world.take(tokens(3, *ids("x")))
    world.clock.now += 20
    await world.take(tokens(1, *ids("x")), tokens(2, *ids("x" * 100)))
    find = world.processor.find_slow
    assert find(max_unread_bytes=400, max_unread_s=30) == [big]
    world.clock.now += 11
    assert find(max_unread_bytes=400, max_unread_s=30) == [big, old]
    await big.next()
    assert find(max_unread_bytes=400, max_unread_s=30) == [old]
    assert idle.unread_bytes == 5


async def test_a_reader_that_is_stuck_with_the_last_it_took_is_found(world) -> None:
    stuck, reading = world.add(1), world.add(2)
    await world.take(finish(1, LENGTH, *ids("x")), tokens(2, *ids("x")))
    await stuck.next()
    await reading.next()
    world.clock.now += 31
    reader = asyncio.create_task(reading.next())
    await asyncio.sleep(0)
    assert world.processor.find_slow(max_unread_bytes=400, max_unread_s=30) == [stuck]
    reader.cancel()


# --- fairness ---
@pytest.mark.regression("fairness of the 128 slices")
async def test_large_batches_yield_to_the_event_loop(world) -> None:
    handles = range(3 * SLICE)
    for handle in handles:
        world.add(handle)
    turns: list[int] = []

    async def other_task() -> None:
        while world.processor.num_choices:
            turns.append(world.processor.num_choices)
            await asyncio.sleep(0)

    other = asyncio.create_task(other_task())
    await asyncio.sleep(0)
    await world.take(*(finish(handle, LENGTH, 5) for handle in handles))
    await other
    assert turns == [3 * SLICE, 2 * SLICE, SLICE]


async def test_request_closed_between_two_slices_is_skipped(world) -> None:
    collectors = [world.add(handle) for handle in range(SLICE + 1)]
    closing = asyncio.create_task(_close_soon(world, collectors[-1]))
    await world.take(*(tokens(handle, 5) for handle in range(SLICE + 1)))
    assert await closing == [SLICE]
    assert collectors[-1].unread_bytes == 0


async def _close_soon(world: World, collector) -> list[int]:
    return world.processor.close(collector)


async def test_a_plain_token_costs_microseconds(world) -> None:
    collectors = [world.add(handle) for handle in range(64)]
    batches = [[tokens(handle, 70 + step % 20) for handle in range(64)] for step in range(100)]
    await world.take(*(queued(handle) for handle in range(64)))
    start = time.process_time()
    for batch in batches:
        await world.processor.process_outputs(batch)
    cost_s = (time.process_time() - start) / (64 * 100)
    # Well above what it takes, so that only a real regression fails.
    assert cost_s < 100e-6
    assert all(collector.unread_bytes == 500 for collector in collectors)


# --- log-probabilities ---
async def test_the_prompt_is_given_once_with_what_the_cache_had(world) -> None:
    collector = world.add(7, 8, prompt_token_ids=[50, 51, 52], output={"num_prompt_logprobs": 1})
    await world.take(queued(7), queued(8), EngineOutput(7, prompt_logprobs=fake_rows([51], 1, 1)))
    assert await collector.next() == [Admitted()]
    first = EngineOutput(7, tuple(ids("a")), cached_prompt_tokens=0, prompt_logprobs=fake_rows([52], 2, 1))
    await world.take(EngineOutput(8, tuple(ids("b")), cached_prompt_tokens=2), first)
    items = await collector.next()
    assert items[0] == PromptReady((fake_rows([51], 1, 1), fake_rows([52], 2, 1)), 2)
    await world.take(finish(7, LENGTH), finish(8, LENGTH))
    assert not any(isinstance(item, PromptReady) for item in await read_all(collector))


async def test_rows_that_do_not_fit_fail_their_request_alone(world) -> None:
    bad = world.add(1, output={"num_logprobs": 1})
    good = world.add(2)
    await world.take(queued(1), queued(2), tokens(1, *ids("a")), finish(2, LENGTH, *ids("b")))
    with pytest.raises(RequestFailedError) as caught:
        await read_all(bad)
    assert caught.value.reason == "OUTPUT_PROCESSING"
    assert text_of(await read_all(good)) == "b"
    assert world.aborts.calls == [([1], AbortKind.FRONTEND_ERROR)]
    assert world.failures == [Stage.LOGPROBS]
