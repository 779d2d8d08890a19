"""The mailbox between the output processor and one handler: one slot a choice and an event.

Both sides run on the event loop (offline: in the caller's thread). When the handler is behind, deltas of a choice
merge, so memory is bounded by the answer; choices never overwrite each other, and an exception replaces everything.
Never blocks the writer.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from frontend.engine_outputs import TracedEvent
from frontend.generation_events import Admitted, ChoiceDelta, ChoiceFinished, CollectorItem, PromptReady, Timings, Usage
from frontend.request_stats import RequestStats
from stepwire.errors import StepwireError
from stepwire.packed_logprobs import PackedLogprobs

_BYTES_PER_TOKEN_ID = 4


@dataclass(slots=True)
class _Slot:
    """Unread output of one choice. Tokens without text or ids to show are counted and wait for what comes next."""

    # When the oldest part arrived that the handler is to see.
    since: float | None = None
    # When it was first complete enough to be handed out; a chunk that is old enough has no such moment.
    ripe_since: float | None = None
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PackedLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    num_bytes: int = 0
    finished: ChoiceFinished | None = None


class OutputCollector:
    """Written by the output processor, read by one handler with `next`."""

    def __init__(
        self,
        num_choices: int,
        stats: RequestStats,
        *,
        min_chunk_tokens: int = 0,
        max_chunk_delay_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_choices = num_choices
        self._stats = stats
        self._min_chunk_tokens = min_chunk_tokens
        self._max_chunk_delay_s = max_chunk_delay_s
        self._clock = clock
        # Resolved by the first news while the handler waits; those that follow before it runs cost nothing more.
        self._waiter: asyncio.Future[None] | None = None
        self._slots: dict[int, _Slot] = {}
        # Choices whose first delta was handed out.
        self._started: set[int] = set()
        self._admission: Admitted | None = None
        self._prompt: PromptReady | None = None
        self._is_admitted = False
        self._error: StepwireError | None = None
        self._num_finished = 0
        self._unread_bytes = 0
        # Since when the handler has been at work on what it took last, the end included; None while it waits.
        self.busy_since: float | None = None
        # Pieces that were not handed out alone because the handler was behind.
        self.num_merged = 0

    @property
    def usage(self) -> Usage:
        """Counts so far; final once every choice has finished."""
        return self._stats.usage

    @property
    def timings(self) -> Timings:
        """Durations so far; final once every choice has finished."""
        return self._stats.timings

    def keep_events(self) -> None:
        """A trace wants them; called before there are any."""
        self._stats.events = []

    @property
    def events(self) -> Sequence[TracedEvent]:
        """What has happened in the engine, if it is kept."""
        return self._stats.events or ()

    @property
    def is_done(self) -> bool:
        """Every choice's end was handed out."""
        return self._num_finished == self._num_choices

    @property
    def unread_bytes(self) -> int:
        """Size of the output the handler has not taken."""
        return self._unread_bytes

    @property
    def oldest_unread_time(self) -> float | None:
        """Since when output waits for the handler; None while the handler waits for output, or a chunk to be full."""
        if self._waiter is not None:
            return None
        times = (self._ripe_time(slot) for slot in self._slots.values())
        return min((time for time in times if time is not None), default=None)

    def admit(self) -> None:
        self._is_admitted = True
        self._admission = Admitted()
        self._wake()

    def put_prompt(self, prompt: PromptReady) -> None:
        """Given out before any output that follows. Its size was bounded when the request came in."""
        self._prompt = prompt
        self._wake()

    def push(
        self,
        choice: int,
        text: str,
        token_ids: Sequence[int],
        num_tokens: int,
        logprobs: PackedLogprobs | None = None,
    ) -> None:
        """Add output of a choice; text and ids may be empty while `num_tokens` counts."""
        slot = self._slot(choice)
        slot.num_tokens += num_tokens
        if not text and not token_ids and logprobs is None:
            return
        is_first = slot.since is None
        if is_first:
            slot.since = self._clock()
        # The first chunk goes at once.
        if slot.ripe_since is None and (slot.num_tokens >= self._min_chunk_tokens or choice not in self._started):
            self._ripen(slot)
        slot.pieces.append(text)
        slot.token_ids.extend(token_ids)
        num_bytes = (len(text) if text.isascii() else len(text.encode())) + _BYTES_PER_TOKEN_ID * len(token_ids)
        if logprobs is not None:
            slot.logprobs.append(logprobs)
            num_bytes += logprobs.num_bytes
        slot.num_bytes += num_bytes
        self._unread_bytes += num_bytes
        # The first part starts the delay of its chunk, which the handler has to watch.
        if self._waiter is not None and (is_first or self._ripe_time(slot) is not None):
            self._wake()

    def finish(self, finished: ChoiceFinished) -> None:
        slot = self._slot(finished.choice)
        slot.finished = finished
        self._ripen(slot)
        self._wake()

    def fail(self, error: StepwireError) -> None:
        """End the whole request; the first error stays. What is unread is dropped."""
        if self._error is None:
            self._error = error
            self._slots.clear()
            self._unread_bytes = 0
            self._wake()

    def take(self) -> list[CollectorItem]:
        """Everything that is ready now, which may be nothing. Raises a failure's error."""
        if self._error is not None:
            # Requests share the death of their engine; raised itself, it would collect the frames of them all.
            raise copy.copy(self._error)
        return self._take_ripe()

    async def next(self) -> list[CollectorItem]:
        """Everything that is ready, waiting for the first; empty = every choice has ended. Raises a failure's error."""
        self.busy_since = None
        while True:
            items = self.take()
            if items or self.is_done:
                self.busy_since = self._clock()
                return items
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._until_due(self._waiter)
            finally:
                self._waiter = None

    def _until_due(self, waiter: asyncio.Future[None]) -> Awaitable[object]:
        """For news, and for as long as a held chunk may wait."""
        delay_s = self._remaining_delay_s()
        return waiter if delay_s is None else asyncio.wait({waiter}, timeout=delay_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _slot(self, choice: int) -> _Slot:
        slot = self._slots.get(choice)
        if slot is None:
            slot = self._slots[choice] = _Slot()
        return slot

    def _remaining_delay_s(self) -> float | None:
        """Time until the oldest held chunk must go; None = nothing is held, or without bound."""
        if not self._max_chunk_delay_s or not self._is_admitted:
            return None
        since = min((slot.since for slot in self._slots.values() if slot.since is not None), default=None)
        return None if since is None else max(0.0, since + self._max_chunk_delay_s - self._clock())

    def _ripen(self, slot: _Slot) -> None:
        if slot.ripe_since is None:
            due = self._ripe_time(slot)
            slot.ripe_since = self._clock() if due is None else due

    def _ripe_time(self, slot: _Slot) -> float | None:
        """Since when a slot may be handed out: its chunk is the first, the last, large enough or old enough."""
        if slot.ripe_since is not None or slot.since is None or not self._max_chunk_delay_s:
            return slot.ripe_since
        due = slot.since + self._max_chunk_delay_s
        return due if due <= self._clock() else None

    def _take_ripe(self) -> list[CollectorItem]:
        if not self._is_admitted:
            return []
        items: list[CollectorItem] = []
        if self._admission is not None:
            items.append(self._admission)
            self._admission = None
        if self._prompt is not None:
            items.append(self._prompt)
            self._prompt = None
        if self._slots:
            for choice in [choice for choice, slot in self._slots.items() if self._ripe_time(slot) is not None]:
                self._take_slot(choice, self._slots.pop(choice), items)
        return items

    def _take_slot(self, choice: int, slot: _Slot, items: list[CollectorItem]) -> None:
        self._unread_bytes -= slot.num_bytes
        if slot.pieces:
            self._started.add(choice)
            if not self._min_chunk_tokens:
                self.num_merged += len(slot.pieces) - 1
            logprobs = PackedLogprobs.join(slot.logprobs) if slot.logprobs else None
            text = "".join(slot.pieces)
            items.append(ChoiceDelta(choice, text, tuple(slot.token_ids), slot.num_tokens, logprobs))
        if slot.finished is not None:
            self._num_finished += 1
            items.append(slot.finished)
