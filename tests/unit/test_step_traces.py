"""Spans of steps: how many there are, what is in them, and which requests they are linked to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, TraceFlags

from engine_core.scheduler.request import RequestKey
from engine_core.step_traces import SPAN_NAME, StepTraces
from fakes.looped_engine import SESSION, LoopedEngine
from stepwire import tracing

TRACED = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))
PHASES = ["schedule", "execute", "sample", "update"]


def context_of(key: RequestKey) -> SpanContext | None:
    return TRACED if key == (SESSION, 1) else None


class Stepped:
    """An engine whose steps are traced, at one millisecond for each look at the clock."""

    def __init__(self, ratio: float) -> None:
        self.exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        detail = tracing.Detail()
        detail.ratio, detail.tracer = ratio, provider.get_tracer("test")
        self.engine = LoopedEngine()
        self.engine.proc.core.clock = self._tick
        self.traces = StepTraces(detail, tracing.WallClock(lambda: 0.0), context_of)
        self.engine.proc.core.on_step = self.traces.note

    def _tick(self) -> float:
        self.engine.now += 0.001
        return self.engine.now


@pytest.fixture
def stepped(request: pytest.FixtureRequest) -> Iterator[Stepped]:
    made = Stepped(request.param)
    yield made
    made.traces.close()


@pytest.mark.parametrize("stepped", [1.0], indirect=True)
def test_a_step_has_its_phases_and_links_to_the_requests_that_are_traced(stepped: Stepped) -> None:
    stepped.engine.add(1, num_prompt=6, max_tokens=2)
    stepped.engine.add(2, num_prompt=4, max_tokens=1)
    stepped.engine.run()
    stepped.traces.close()
    spans = stepped.exporter.get_finished_spans()
    steps = [span for span in spans if span.name == SPAN_NAME]
    assert [(span.attributes or {})["tokens"] for span in steps] == [10, 1, 0]
    assert steps[0].attributes == {"step": 1, "kind": "prefill", "tokens": 10, "requests": 2}
    assert [[link.context for link in span.links] for span in steps] == [[TRACED], [TRACED], []]
    # None is a part of another's trace.
    assert all(span.parent is None for span in steps)
    assert len({span.context.trace_id for span in steps}) == len(steps)
    inside = [span for span in spans if span.parent is not None and span.parent.span_id == steps[0].context.span_id]
    assert [span.name for span in inside] == PHASES
    schedule, execute, sample, update = inside
    assert steps[0].start_time == schedule.start_time < schedule.end_time == execute.start_time
    assert execute.start_time < sample.start_time < sample.end_time < execute.end_time == update.start_time
    assert update.start_time < update.end_time == steps[0].end_time


@pytest.mark.parametrize("stepped", [0.3], indirect=True)
def test_only_a_share_of_the_steps_has_spans(stepped: Stepped) -> None:
    stepped.engine.add(1, num_prompt=1, max_tokens=200)
    stepped.engine.run()
    stepped.traces.close()
    num_steps = sum(span.name == SPAN_NAME for span in stepped.exporter.get_finished_spans())
    # 60, and six standard deviations.
    assert 20 < num_steps < 100


@pytest.mark.parametrize("stepped", [0.0], indirect=True)
def test_a_step_that_is_not_drawn_looks_nothing_up(stepped: Stepped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepped.traces, "_context_of", None)
    stepped.engine.add(1)
    stepped.engine.run()
    stepped.traces.close()
    assert stepped.exporter.get_finished_spans() == ()
