"""The start of an engine as a trace of its own: `startup`, and a span for each phase. Made when it is over."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace

from stepwire import tracing


def trace_startup(times: Mapping[str, float], end: float) -> None:
    """`times`: seconds of each phase, in their order; the last ended at `end` of the monotonic clock."""
    clock = tracing.WallClock()
    begin = end - sum(times.values())
    startup = tracing.tracer.start_span("startup", start_time=clock.at(begin))
    context = trace.set_span_in_context(startup)
    for phase, duration_s in times.items():
        span = tracing.tracer.start_span(f"startup.{phase}", context, start_time=clock.at(begin))
        begin += duration_s
        span.end(clock.at(begin))
    startup.end(clock.at(end))
