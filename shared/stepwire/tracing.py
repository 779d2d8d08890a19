"""OpenTelemetry for both services: W3C trace context in and out, and export of spans, off unless an endpoint is set.

With tracing off every span is the API's no-op; a caller's trace context is still passed on. Spans never hold prompts or
outputs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stepwire import __version__
from stepwire.settings import Settings, library_variable
from stepwire.span_export import make_providers

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
_NS_PER_S = 1_000_000_000
_PROPAGATOR = TraceContextTextMapPropagator()

tracer = trace.get_tracer("stepwire", __version__)


class Detail:
    """What is too much to be traced always, and who makes its spans. Set once, at the start."""

    def __init__(self) -> None:
        self.ratio = 0.0
        self.tracer: trace.Tracer = trace.NoOpTracer()
        # Every request has a span here whose trace is sampled where it comes from.
        self.follows_callers = False

    def is_wanted(self) -> bool:
        """Drawn anew with each call."""
        return self.ratio > 0 and random.random() < self.ratio


detail = Detail()


def start(service: str, instance_id: str, settings: Settings) -> Callable[[], None]:
    """Export the spans of this process; returns what flushes and ends it. Does nothing without an endpoint.

    `service`: the value of service.name. Call once, before requests come.
    """
    providers = make_providers(service, instance_id, settings)
    if providers is None:
        return lambda: None
    trace.set_tracer_provider(providers.sampling)
    detail.ratio, detail.tracer = settings.trace_detail_ratio, providers.keeping.get_tracer("stepwire", __version__)
    detail.follows_callers = providers.follows_callers
    return providers.sampling.shutdown


def extract(metadata: Iterable[tuple[str, str | bytes]]) -> Context | None:
    """The trace context among a call's metadata or headers; None when there is none that is valid."""
    carrier = {key: value for key, value in metadata if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)}
    if TRACEPARENT not in carrier:
        return None
    context = _PROPAGATOR.extract(carrier)
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def trace_id_of(traceparent: str) -> str:
    """Its second part, which log lines carry; empty when it has none."""
    return traceparent.split("-", 2)[1] if traceparent.count("-") >= 2 else ""


def inject(span: trace.Span) -> tuple[str, str]:
    """(traceparent, tracestate) that name this span as the parent; empty when it is in no trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier.get(TRACEPARENT, ""), carrier.get(TRACESTATE, "")


def parent_of_process() -> Context | None:
    """The trace that whoever has started this process belongs to, by TRACEPARENT and TRACESTATE of the environment."""
    return extract([(name, library_variable(name.upper())) for name in (TRACEPARENT, TRACESTATE)])


def environment_of_child(span: trace.Span) -> dict[str, str]:
    """Variables that make this span the parent of what a new process does first; none when it is in no trace."""
    traceparent, tracestate = inject(span)
    return {TRACEPARENT.upper(): traceparent, TRACESTATE.upper(): tracestate} if traceparent else {}


class WallClock:
    """Places monotonic times on the wall clock, with one offset: a correction of the clock bends no span."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._offset_ns = time.time_ns() - round(monotonic() * _NS_PER_S)

    def at(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970 of a time in seconds of the monotonic clock."""
        return self._offset_ns + round(monotonic_s * _NS_PER_S)
