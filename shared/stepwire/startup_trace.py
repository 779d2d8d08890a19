"""The start of a process that waits for others, as a span `startup` with parts. One thread, or one event loop.

It is a part of the trace of whoever has started the process, if there is one. What the process starts is a part of it.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from stepwire import tracing


class StartupTrace:
    """From its making to `end`."""

    def __init__(self) -> None:
        self._startup: Span = tracing.tracer.start_span("startup", tracing.parent_of_process())
        self._parts: list[Span] = []

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a process that is started now."""
        return tracing.environment_of_child(self._startup)

    def begin(self, name: str) -> None:
        """A part that lasts until the end."""
        self._parts.append(tracing.tracer.start_span(name, trace.set_span_in_context(self._startup)))

    def end(self, *, is_serving: bool) -> None:
        """It serves, or the process ends before that. Nothing happens the second time."""
        for span in (*self._parts, self._startup):
            if not is_serving and span.is_recording():
                span.set_status(Status(StatusCode.ERROR, "it was stopped before it served"))
            if span.is_recording():
                span.end()
