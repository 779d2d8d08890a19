"""Counts and stamps of one request, summed over its choices. Engine stamps and our own clock are never mixed."""

from __future__ import annotations

from frontend.engine_outputs import EngineEvent, EngineOutput, TracedEvent, traced_events
from frontend.generation_events import Timings, Usage


class RequestStats:
    """Owned by the output processor; read by the handler through its collector."""

    def __init__(self, prompt_tokens: int, arrival_time: float) -> None:
        self._prompt_tokens = prompt_tokens
        self._arrival_time = arrival_time
        self._completion_tokens = 0
        self._cached_prompt_tokens: int | None = None
        self._preemptions = 0
        self._ttft_s: float | None = None
        # Kept for a trace that wants them.
        self.events: list[TracedEvent] | None = None
        # Engine clock, ns; the first over all choices, except the last token.
        self._queued_ns: int | None = None
        self._scheduled_ns: int | None = None
        self._first_token_ns: int | None = None
        self._last_token_ns = 0

    @property
    def has_tokens(self) -> bool:
        return self._ttft_s is not None

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._completion_tokens, self._cached_prompt_tokens or 0)

    @property
    def timings(self) -> Timings:
        return Timings(
            queued_ns=_elapsed(self._queued_ns, self._scheduled_ns),
            prefill_ns=_elapsed(self._scheduled_ns, self._first_token_ns),
            decode_ns=_elapsed(self._first_token_ns, self._last_token_ns),
            ttft_ns=round((self._ttft_s or 0.0) * 1e9),
            preemptions=self._preemptions,
        )

    def note_plain_token(self, monotonic_ns: int) -> None:
        """One more token, which is not the first."""
        self._completion_tokens += 1
        if monotonic_ns > self._last_token_ns:
            self._last_token_ns = monotonic_ns

    def add_completion_tokens(self, num_tokens: int) -> None:
        self._completion_tokens += num_tokens

    def note_first_token(self, now: float) -> None:
        self._ttft_s = now - self._arrival_time

    def note_tokens(self, monotonic_ns: int) -> None:
        if self._first_token_ns is None:
            self._first_token_ns = monotonic_ns
        self._last_token_ns = max(self._last_token_ns, monotonic_ns)

    def note_news(self, output: EngineOutput, choice: int) -> None:
        """Take what comes besides tokens: events, the prefix hit, the number of preemptions."""
        if self.events is not None:
            self.events += traced_events(choice, output)
        for event, stamp in output.events:
            self._note_event(event, stamp)
        # The first child to be scheduled paid for the prompt; its siblings hit what it wrote.
        if self._cached_prompt_tokens is None:
            self._cached_prompt_tokens = output.cached_prompt_tokens
        if output.finish is not None:
            self._preemptions += output.finish.preemptions

    def _note_event(self, event: EngineEvent, stamp: int) -> None:
        if event is EngineEvent.QUEUED:
            self._queued_ns = _earlier(self._queued_ns, stamp)
        elif event is EngineEvent.SCHEDULED:
            self._scheduled_ns = _earlier(self._scheduled_ns, stamp)
        elif event is EngineEvent.FIRST_TOKEN:
            self._first_token_ns = _earlier(self._first_token_ns, stamp)


def _earlier(known: int | None, stamp: int) -> int:
    return stamp if known is None else min(known, stamp)


def _elapsed(start: int | None, end: int | None) -> int:
    return max(end - start, 0) if start is not None and end is not None else 0
