"""Events of an engine that does not trace, put on the frontend's own span, at times carried over from its clock.

An engine that traces shows them itself, exactly and with numbers; what travels with the outputs are kinds and times.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.trace import Span

from frontend.engine_client.clock_offset import ClockOffset
from frontend.engine_outputs import TracedEvent
from stepwire import tracing


class SpanTimes:
    """When a span began, on the clock that its events come by and on the wall clock. Made as it begins."""

    def __init__(self, monotonic: float) -> None:
        self._began = monotonic
        self._clock = tracing.WallClock()

    def within(self, monotonic: float, now: float) -> int:
        """The date of a time, in ns; one that an estimate has put before the span or behind `now` is moved into it."""
        return self._clock.at(min(max(monotonic, self._began), now))


def place_events(
    span: Span, times: SpanTimes, events: Sequence[TracedEvent], clock: ClockOffset, now: float, *, has_choices: bool
) -> None:
    """In order; `has_choices`: the span is of several, and each event says whose it is."""
    for event in sorted(events):
        facts: dict[str, str | int] = {"choice": event.choice} if has_choices else {}
        if event.reason:
            facts["reason"] = event.reason
        span.add_event(event.name, facts, times.within(clock.to_ours(event.monotonic_ns), now))
    span.set_attribute("stepwire.clock", "estimated")
