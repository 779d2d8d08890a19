"""The engine's spans of one session, and what a frontend passes on when it exports nothing."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine_core.request_traces import RequestTraces
from engine_core.scheduler.output import EngineCoreOutput, Finish, FinishReason
from engine_core.scheduler.request import EventType, RequestEvent
from stepwire import tracing

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = ((tracing.TRACEPARENT, f"00-{TRACE_ID}-b7ad6b7169203331-01"), (tracing.TRACESTATE, "vendor=x"))


def finished(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_events_stand_at_the_engines_times_and_the_finish_ends_the_span(exported: InMemorySpanExporter) -> None:
    traces = RequestTraces(tracing.WallClock(lambda: 0.0))
    traces.begin(7, "id", CONTEXT)
    scheduled = EngineCoreOutput(
        ("s", 7),
        events=[
            RequestEvent(EventType.QUEUED, 1.0, {"position": 3, "waiting_tokens_ahead": 70}),
            RequestEvent(EventType.SCHEDULED, 2.5, {"step": 9, "cached_tokens": 4, "blocks": 2}),
        ],
    )
    traces.note([scheduled], now=3.0)
    assert exported.get_finished_spans() == ()
    traces.note([EngineCoreOutput(("s", 7), finish=Finish(FinishReason.STOP, stop_token_id=2))], now=4.0)
    span = finished(exported)
    assert [event.name for event in span.events] == ["QUEUED", "SCHEDULED", "FINISHED"]
    queued, planned, end = span.events
    assert planned.timestamp - queued.timestamp == 1_500_000_000
    assert span.end_time - queued.timestamp == 3_000_000_000
    assert queued.attributes == {"position": 3, "waiting_tokens_ahead": 70}
    assert planned.attributes == {"step": 9, "cached_tokens": 4, "blocks": 2}
    assert end.attributes == {"reason": "stop", "stop_token_id": 2}
    assert f"{span.context.trace_id:032x}" == TRACE_ID


@pytest.mark.parametrize("context", [(), ((tracing.TRACEPARENT, "nonsense"),), ((tracing.TRACEPARENT, ""),)])
def test_a_request_without_a_valid_context_has_no_span(exported: InMemorySpanExporter, context) -> None:
    traces = RequestTraces(tracing.WallClock())
    traces.begin(7, "id", context)
    traces.note([EngineCoreOutput(("s", 7), finish=Finish(FinishReason.STOP))], now=1.0)
    # A request in an invalid trace would otherwise begin one of its own.
    assert exported.get_finished_spans() == ()


def test_a_session_that_ends_ends_its_spans_as_failures(exported: InMemorySpanExporter) -> None:
    traces = RequestTraces(tracing.WallClock())
    traces.begin(7, "id", CONTEXT)
    traces.close()
    traces.close()
    assert not finished(exported).status.is_ok


def test_without_export_the_callers_context_is_passed_on() -> None:
    context = tracing.extract(CONTEXT)
    span = tracing.tracer.start_span("any", context)
    assert not span.is_recording()
    assert tracing.inject(span) == (CONTEXT[0][1], CONTEXT[1][1])
    assert tracing.inject(trace.INVALID_SPAN) == ("", "")
