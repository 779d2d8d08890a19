"""OpenTelemetry for both services: W3C trace context in and out, and export of spans, off unless an endpoint is set.

With tracing off every span is the API's no-op; a caller's trace context is still passed on. Spans never hold prompts or
outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stepwire import __version__
from stepwire.settings import Settings
from stepwire.span_export import make_provider

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_NS_PER_S = 1_000_000_000
_PROPAGATOR = TraceContextTextMapPropagator()

tracer = trace.get_tracer("stepwire", __version__)


def start(service: str, instance_id: str, settings: Settings) -> Callable[[], None]:
    """Export the spans of this process; returns what flushes and ends it. Does nothing without an endpoint.

    `service`: the value of service.name. Call once, before requests come.
    """
    provider = make_provider(service, instance_id, settings)
    if provider is None:
        return lambda: None
    trace.set_tracer_provider(provider)
    return provider.shutdown


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> Context | None:
    """The trace context among a call's metadata or headers; None when there is none that is valid."""
    carrier = {key: value for key, value in metadata if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)}
    if TRACEPARENT not in carrier:
        return None
    context = _PROPAGATOR.extract(carrier)
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def inject(span: trace.Span) -> tuple[str, str]:
    """(traceparent, tracestate) that name this span as the parent; empty when it is in no trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(TRACEPARENT, ""), carrier.get(TRACESTATE, "")


class WallClock:
    """Places monotonic times on the wall clock, with one offset: a correction of the clock bends no span."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._offset_ns = time.time_ns() - round(monotonic() * _NS_PER_S)

    def at(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970 of a time in seconds of the monotonic clock."""
        return self._offset_ns + round(monotonic_s * _NS_PER_S)
