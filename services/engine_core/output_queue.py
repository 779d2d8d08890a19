"""The output queue: routes what the loop produced to one bounded outbox for each session.

`put` never waits: a slow frontend costs memory up to a limit and then its session, never the loop's time. The output
thread of the session (the handler thread of its stream) takes what is there, merged for each request.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_core.messages import EngineCoreDead, OutputMessage, Pong
from engine_core.output_frames import size_of_all
from engine_core.reason_counter import ReasonCounter
from engine_core.scheduler.output import EngineCoreOutput, EngineCoreOutputs
from engine_core.scheduler.request import RequestKey
from stepwire.packed_logprobs import PackedLogprobs

# A rough wire size; the limit guards memory, it is not an account.
_MESSAGE_BYTES = 64
# What the counter of merged steps counts.
BATCHES = "batches"


@dataclass(frozen=True, slots=True)
class _End:
    """Nothing after it is written."""

    last: OutputMessage | None


@dataclass(slots=True)
class _Waiting:
    """A message in the line."""

    item: OutputMessage | _End
    # Found out by who asks first: neither the loop nor the output thread needs it.
    num_bytes: int = 0


class Outbox:
    """Messages waiting for one stream. Put by any thread, taken by the output thread of the session.

    Without a lock, which the output thread might hold while it waits for the interpreter: appending is one operation,
    and what must be the last is marked in the line itself.
    """

    def __init__(self, max_bytes: int, max_age_s: float, clock: Callable[[], float], coalesced: ReasonCounter) -> None:
        self._coalesced = coalesced
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        # Holds something whenever `_waiting` may.
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._last_taken = clock()
        self._is_ended = False
        self._is_cut = False
        # The output thread has met the end.
        self._is_done = False
        # The output thread has returned from its stream: nothing more will be written.
        self._is_closed = threading.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: OutputMessage) -> None:
        """Queue a message; dropped after the end, when nobody will read it."""
        if not self._is_ended:
            self._append(message)

    def end(self, last: OutputMessage | None = None, *, discard: bool = False) -> None:
        """Nothing follows `last`: the output thread writes what waits, unless it is discarded, and ends the stream."""
        self._is_ended = True
        if discard:
            self._is_cut = True
            self._waiting.clear()
        self._append(_End(last))

    def _append(self, item: OutputMessage | _End) -> None:
        if not self._waiting:
            self._last_taken = self._clock()
        self._waiting.append(_Waiting(item))
        if self._is_done:
            # It came behind the end, and would wait for ever.
            self._waiting.clear()
        self._wake_ups.put(None)

    @property
    def unsent_bytes(self) -> int:
        """About as many as wait to be written."""
        return sum(map(_num_bytes, list(self._waiting)))

    def is_too_far_behind(self) -> bool:
        """More than the limit waits, or it waits longer than the limit: the session is to be cut.

        Stays true once the outbox was cut, until its stream is over: the output thread may hang in a write. Called
        again and again by one thread; each output is looked at once, however long it waits.
        """
        waiting = list(self._waiting)
        is_late = bool(waiting) and self._clock() - self._last_taken > self._max_age_s
        return is_late or self._is_cut or sum(map(_num_bytes, waiting)) > self._max_bytes

    def note_written(self) -> None:
        """A frame has gone out: whoever reads is slow at most. Called by the output thread."""
        self._last_taken = self._clock()

    def take(self) -> list[OutputMessage] | None:
        """Wait for messages and take them all, pongs first and outputs merged; None = the end."""
        while not self._is_done:
            self._wake_ups.get()
            while not self._wake_ups.empty():
                self._wake_ups.get()
            messages = self._take_waiting()
            if messages:
                self._coalesced.add(BATCHES, num_steps_behind(messages))
                # A frontend that is behind must not take the time that much output needs for the engine's silence.
                return sorted(coalesce(messages), key=_is_no_pong)
        return None

    def _take_waiting(self) -> list[OutputMessage]:
        self._last_taken = self._clock()
        messages: list[OutputMessage] = []
        # Another thread may discard what waits: then there is nothing to pop, whatever was seen before.
        with contextlib.suppress(IndexError):
            while not self._is_done:
                item = self._waiting.popleft().item
                if isinstance(item, _End):
                    self._is_done = True
                    # Whoever adds behind this line looks at the mark above.
                    self._waiting.clear()
                    messages += [] if item.last is None else [item.last]
                else:
                    messages.append(item)
        return [] if self._is_cut else messages

    def close(self) -> None:
        """Called by the output thread when its stream is over."""
        self.end()
        self._is_closed.set()

    def wait_closed(self, timeout_s: float) -> bool:
        return self._is_closed.wait(timeout_s)


class OutputQueue:
    """Outboxes by session id. Owner of the routing only; never of what a message means."""

    def __init__(self, clock: Callable[[], float], *, max_bytes: int = 64 * 2**20, max_age_s: float = 30.0) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._outboxes: dict[str, Outbox] = {}
        # Steps whose tokens went out with those of a later one.
        self.coalesced = ReasonCounter((BATCHES,))
        self._is_ended = False
        self._last: OutputMessage | None = None

    def attach(self, session_id: str) -> Outbox:
        """A new outbox for a session; from now on nothing is put into an older one under the same id."""
        outbox = Outbox(self._max_bytes, self._max_age_s, self._clock, self.coalesced)
        with self._lock:
            self._outboxes[session_id] = outbox
            if self._is_ended:
                outbox.end(self._last)
        return outbox

    def detach(self, session_id: str, outbox: Outbox) -> None:
        """Forget an outbox, unless the session has a newer one by now."""
        with self._lock:
            if self._outboxes.get(session_id) is outbox:
                del self._outboxes[session_id]

    def put(self, session_id: str, message: OutputMessage) -> None:
        """To one session; dropped when it is gone. Takes no lock, so that the loop waits for nobody."""
        outbox = self._outboxes.get(session_id)
        if outbox is not None:
            outbox.put(message)

    def put_all(self, message: OutputMessage) -> None:
        """To every session, without a lock as well."""
        for outbox in list(self._outboxes.values()):
            outbox.put(message)

    def put_dead(self, dead: EngineCoreDead) -> None:
        """ENGINE_CORE_DEAD: the last message of every stream, of those too that attach from now on."""
        self.end_all(dead)

    def end_all(self, last: OutputMessage | None = None) -> None:
        """Every stream ends after what waits for it, and after `last`."""
        with self._lock:
            self._is_ended = True
            self._last = last
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.end(last)

    def wait_written(self, timeout_s: float) -> bool:
        """Wait until every stream is over; False when the time ran out."""
        deadline = self._clock() + timeout_s
        return all(outbox.wait_closed(max(0.0, deadline - self._clock())) for outbox in self._snapshot())

    def too_far_behind(self) -> list[str]:
        """Sessions whose frontend does not read."""
        outboxes = self._outboxes.copy()
        return [session_id for session_id, outbox in outboxes.items() if outbox.is_too_far_behind()]

    @property
    def depth(self) -> int:
        """Messages waiting over all sessions."""
        return sum(len(outbox) for outbox in self._snapshot())

    def _snapshot(self) -> list[Outbox]:
        with self._lock:
            return list(self._outboxes.values())


def num_steps_behind(messages: list[OutputMessage]) -> int:
    """Steps whose tokens go out with those of a later one. What the queue says beside a step is no sign of it."""
    if len(messages) < 2:
        return 0
    batches = [message for message in messages if isinstance(message, EngineCoreOutputs)]
    steps = {batch.step for batch in batches if any(output.new_token_ids for output in batch.outputs)}
    return max(0, len(steps) - 1)


def _is_no_pong(message: OutputMessage) -> bool:
    return not isinstance(message, Pong)


def coalesce(messages: list[OutputMessage]) -> list[OutputMessage]:
    """Merge all EngineCoreOutputs into the first one. Tokens, rows and events concatenate, the newest stats survive.

    Nothing is lost, and a frontend that is behind gets fewer and larger frames.
    """
    batches = [message for message in messages if isinstance(message, EngineCoreOutputs)]
    if len(batches) < 2:
        return messages
    others: list[OutputMessage] = [message for message in messages if not isinstance(message, EngineCoreOutputs)]
    newest = batches[-1]
    merged = EngineCoreOutputs(
        step=newest.step,
        time=newest.time,
        outputs=_merge(output for batch in batches for output in batch.outputs),
        stats=next((batch.stats for batch in reversed(batches) if batch.stats is not None), None),
    )
    return [merged, *others]


def _merge(outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
    of_request: dict[RequestKey, list[EngineCoreOutput]] = {}
    for output in outputs:
        of_request.setdefault(output.key, []).append(output)
    return [_merge_request(parts) for parts in of_request.values()]


def _merge_request(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    first = parts[0]
    for output in parts[1:]:
        first.new_token_ids += output.new_token_ids
        first.events += output.events
        first.prefill = first.prefill or output.prefill
        first.finish = output.finish or first.finish
        first.pooled = output.pooled or first.pooled
    if len(parts) > 1:
        first.logprobs = _join(part.logprobs for part in parts)
        first.prompt_logprobs = _join(part.prompt_logprobs for part in parts)
    return first


def _join(parts: Iterable[PackedLogprobs | None]) -> PackedLogprobs | None:
    rows = [part for part in parts if part is not None]
    return PackedLogprobs.join(rows) if rows else None


def _num_bytes(waiting: _Waiting) -> int:
    if not waiting.num_bytes:
        item = waiting.item
        waiting.num_bytes = _MESSAGE_BYTES + (size_of_all(item.outputs) if isinstance(item, EngineCoreOutputs) else 0)
    return waiting.num_bytes
