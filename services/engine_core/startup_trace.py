"""The start of an engine as a trace: `startup`, and a span for each phase. Made when it is over.

It is a part of the trace of whoever has started the process, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace

from stepwire import tracing

# By the names that the phases have in metrics.
SPAN_NAMES = {"load": "load_model", "profile": "profile_memory", "allocate": "allocate_kv_cache"}


def trace_startup(times: Mapping[str, float], end: float) -> None:
    """`times`: seconds of each phase, in their order; the last ended at `end` of the monotonic clock."""
    clock = tracing.WallClock()
    begin = end - sum(times.values())
    startup = tracing.tracer.start_span("startup", tracing.parent_of_process(), start_time=clock.at(begin))
    context = trace.set_span_in_context(startup)
    for phase, duration_s in times.items():
        span = tracing.tracer.start_span(SPAN_NAMES.get(phase, phase), context, start_time=clock.at(begin))
        begin += duration_s
        span.end(clock.at(begin))
    startup.end(clock.at(end))
