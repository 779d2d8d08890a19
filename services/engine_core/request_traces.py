"""Spans of one session's requests: `engine_core.run`, from the input thread to the finish, with what happened between.

Made at the edges, by the threads of the session's stream; the step loop knows no traces. Requests that nobody samples
cost a look into an empty table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode

from engine_core.scheduler.output import EngineCoreOutput, Finish, FinishReason
from stepwire import tracing

SPAN_NAME = "engine_core.run"
_FAILURES = (FinishReason.ERROR, FinishReason.REJECTED)


class RequestTraces:
    """Shared by the input thread and the output thread of a session, hence the lock."""

    def __init__(self, clock: tracing.WallClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: dict[int, Span] = {}

    def begin(self, handle: int, request_id: str, trace_context: Sequence[tuple[str, str]]) -> None:
        """The request has come in; `trace_context` is what the frontend sent with it, W3C names and values."""
        context = tracing.extract(trace_context)
        if context is None:
            return
        attributes = {"gen_ai.request.id": request_id}
        span = tracing.tracer.start_span(SPAN_NAME, context, SpanKind.SERVER, attributes)
        if span.is_recording():
            with self._lock:
                self._spans[handle] = span

    def note(self, outputs: Iterable[EngineCoreOutput], now: float) -> None:
        """Events and ends on their way to the frontend; `now` is the engine's clock."""
        if not self._spans:
            return
        for output in outputs:
            if output.events or output.finish is not None:
                self._note_one(output, now)

    def context_of(self, handle: int) -> SpanContext | None:
        """Where the span of a request is found, while it runs and is recorded."""
        span = self._spans.get(handle)
        return None if span is None else span.get_span_context()

    def close(self) -> None:
        """The session is over: what is left has no finish, and is aborted."""
        with self._lock:
            spans, self._spans = self._spans, {}
        for span in spans.values():
            span.set_status(Status(StatusCode.ERROR, "the session ended"))
            span.end()

    def _note_one(self, output: EngineCoreOutput, now: float) -> None:
        handle = output.key[1]
        with self._lock:
            span = self._spans.get(handle) if output.finish is None else self._spans.pop(handle, None)
        if span is None:
            return
        for event in output.events:
            span.add_event(event.type.name, event.facts, self._clock.at(event.time))
        if output.finish is not None:
            self._finish(span, output.finish, self._clock.at(now))

    def _finish(self, span: Span, finish: Finish, end_ns: int) -> None:
        attributes: dict[str, str | int] = {"reason": finish.reason.name.lower()}
        if finish.stop_token_id is not None:
            attributes["stop_token_id"] = finish.stop_token_id
        span.add_event("FINISHED", attributes, end_ns)
        span.set_attribute("stepwire.preemptions", finish.num_preemptions)
        if finish.error is not None:
            span.set_attribute("error.type", finish.error.reason)
        if finish.reason in _FAILURES:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)
