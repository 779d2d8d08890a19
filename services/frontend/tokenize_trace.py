"""The span of turning a prompt into tokens, the time in the queue of the threads included. Made when it is over.

Where it takes no time worth a look there is none, but in the share of requests that are traced in detail.
"""

from __future__ import annotations

import time

from opentelemetry import trace

from stepwire import tracing

SPAN_NAME = "tokenize"
LONG_S = 0.005


def trace_tokenize(duration_s: float, num_tokens: int) -> None:
    """It has just ended. A part of the current span, if that is recorded."""
    if not trace.get_current_span().is_recording():
        return
    if duration_s > LONG_S or tracing.detail.is_wanted():
        now, clock = time.monotonic(), tracing.WallClock()
        attributes = {"gen_ai.usage.input_tokens": num_tokens}
        span = tracing.tracer.start_span(SPAN_NAME, attributes=attributes, start_time=clock.at(now - duration_s))
        span.end(clock.at(now))
