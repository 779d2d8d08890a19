"""Times carried over from an engine's clock to ours, and the events that are placed by them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fakes.text_requests import make_request
from frontend.engine_client.clock_offset import ClockOffset
from frontend.engine_outputs import EngineEvent, EngineFinish, EngineFinishReason, EngineOutput, TracedEvent
from frontend.estimated_events import SpanTimes
from frontend.request_stats import RequestStats
from frontend.request_trace import ENGINE_SPAN_NAME, RequestTrace, start_request_span
from stepwire import tracing

NS = 1_000_000_000


def test_the_engine_looked_at_its_clock_in_the_middle_of_the_round_trip() -> None:
    clock = ClockOffset("boot")
    assert not clock.is_known
    clock.note(10.0, 12.0, 5000 * NS)
    assert clock.is_known
    assert clock.to_ours(5000 * NS) == pytest.approx(11.0)
    assert clock.to_ours(4999 * NS) == pytest.approx(10.0)


def test_the_shortest_of_the_last_round_trips_counts() -> None:
    clock = ClockOffset("boot")
    clock.note(10.0, 10.25, 100 * NS)
    clock.note(20.0, 24.0, 110 * NS)
    assert clock.to_ours(100 * NS) == pytest.approx(10.125)
    # So long ago that the clocks may have drifted apart.
    for number in range(8):
        clock.note(30.0 + number, 31.0 + number, (121 + number) * NS)
    assert clock.to_ours(121 * NS) == pytest.approx(30.5)


def test_a_time_outside_of_the_span_is_moved_into_it() -> None:
    times = SpanTimes(100.0)
    inside = times.within(101.0, now=102.0)
    assert times.within(99.0, now=102.0) == inside - NS
    assert times.within(103.0, now=102.0) == inside + NS


def test_outputs_tell_kinds_and_times_of_each_choice() -> None:
    stats = RequestStats(3, 0.0)
    first = EngineOutput(7, events=((EngineEvent.QUEUED, 5), (EngineEvent.SCHEDULED, 6)))
    stats.note_news(first, 0)
    assert stats.events is None
    stats.events = []
    stats.note_news(first, 0)
    stats.note_news(EngineOutput(8, finish=EngineFinish(EngineFinishReason.LENGTH), monotonic_ns=9), 1)
    assert stats.events == [
        TracedEvent(5, 0, "QUEUED"),
        TracedEvent(6, 0, "SCHEDULED"),
        TracedEvent(9, 1, "FINISHED", "length"),
    ]


def engine_span(
    exporter: InMemorySpanExporter,
    events: list[TracedEvent],
    clock: ClockOffset | None,
    *,
    num_choices: int = 1,
    is_tracing: bool = False,
) -> ReadableSpan:
    engine = SimpleNamespace(engine_id="engine", boot_id="boot", is_tracing=is_tracing)
    stats = RequestStats(3, 0.0)
    collected = SimpleNamespace(usage=stats.usage, timings=stats.timings, events=events)
    with start_request_span(None, {}):
        request = RequestTrace("r")
        request.submitted(make_request(num_choices=num_choices))
        request.close(engine, collected, ["stop"] * num_choices, clock)
    (span,) = (span for span in exporter.get_finished_spans() if span.name == ENGINE_SPAN_NAME)
    return span


def known_clock() -> ClockOffset:
    clock = ClockOffset("boot")
    clock.note(0.0, 0.0, 0)
    return clock


EVENTS = [
    TracedEvent(30, 0, "PREEMPTED"),
    TracedEvent(10, 0, "QUEUED"),
    TracedEvent(20, 1, "QUEUED"),
    TracedEvent(40, 1, "FINISHED", "stop"),
]


def test_events_stand_in_order_with_their_choices_on_a_span_that_says_so(exported: InMemorySpanExporter) -> None:
    span = engine_span(exported, EVENTS, known_clock(), num_choices=2)
    assert [(event.name, dict(event.attributes)) for event in span.events] == [
        ("QUEUED", {"choice": 0}),
        ("QUEUED", {"choice": 1}),
        ("PREEMPTED", {"choice": 0}),
        ("FINISHED", {"choice": 1, "reason": "stop"}),
    ]
    # The clock says that all of it was long ago.
    assert {span.start_time <= event.timestamp <= span.end_time for event in span.events} == {True}
    assert span.attributes["stepwire.clock"] == "estimated"


def test_one_choice_needs_no_number(exported: InMemorySpanExporter) -> None:
    span = engine_span(exported, EVENTS[:2], known_clock())
    assert [dict(event.attributes) for event in span.events] == [{}, {}]


@pytest.mark.parametrize(("clock", "is_tracing"), [(None, False), (known_clock(), True)])
def test_nothing_is_placed_by_no_clock_or_beside_the_engines_own_span(
    exported: InMemorySpanExporter, clock: ClockOffset | None, is_tracing: bool
) -> None:
    span = engine_span(exported, EVENTS, clock, is_tracing=is_tracing)
    assert span.events == ()
    assert "stepwire.clock" not in span.attributes


def test_a_request_in_no_trace_keeps_no_events() -> None:
    with start_request_span(None, {}):
        trace = RequestTrace("r")
        trace.submitted(make_request())
        assert not trace.is_recorded
    assert tracing.inject(trace._engine_span) == ("", "")
