"""Which requests have spans at a given ratio, in the halves of both services, and that the others cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from engine_core.request_traces import RequestTraces
from engine_core.scheduler.output import EngineCoreOutput, Finish, FinishReason
from fakes.text_requests import make_request
from frontend.request_trace import RequestTrace, start_request_span
from stepwire import tracing

ALL = ["engine_core.request", "engine_core.run", "llm_request"]
CALLER = f"00-{'ab' * 16}-{'cd' * 8}"


@pytest.fixture
def sampling(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], InMemorySpanExporter]:
    def sample(ratio: float) -> InMemorySpanExporter:
        exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=ParentBasedTraceIdRatio(ratio))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        monkeypatch.setattr(tracing, "tracer", provider.get_tracer("test"))
        return exporter

    return sample


def serve(traceparent: str = "") -> str:
    """One request through both services; the context that the engine got."""
    parent = tracing.extract([(tracing.TRACEPARENT, traceparent)]) if traceparent else None
    traces, processed = RequestTraces(tracing.WallClock()), make_request()
    with start_request_span(parent, {}):
        trace = RequestTrace("r")
        trace.submitted(processed)
        sent = processed.template.traceparent
        traces.begin(1, "r", [(tracing.TRACEPARENT, sent)])
        traces.note([EngineCoreOutput(("s", 1), finish=Finish(FinishReason.STOP))], now=1.0)
        trace.close(None, None, ["stop"])
    return sent


@pytest.mark.parametrize(
    ("ratio", "traceparent", "names"),
    [
        (0.0, "", []),
        (1.0, "", ALL),
        # Whoever calls has decided.
        (0.0, f"{CALLER}-01", ALL),
        (1.0, f"{CALLER}-00", []),
    ],
)
def test_both_services_keep_the_same_requests(sampling, ratio: float, traceparent: str, names: list[str]) -> None:
    exporter = sampling(ratio)
    sent = serve(traceparent)
    assert sorted(span.name for span in exporter.get_finished_spans()) == names
    assert bool(int(sent[-2:], 16) & 1) == bool(names)


def test_a_request_that_is_not_sampled_builds_no_attributes_and_no_events(sampling) -> None:
    sampling(0.0)
    traces = RequestTraces(tracing.WallClock())
    with start_request_span(None, {}):
        trace = RequestTrace("r")
        # Nothing else of it is there to be looked at.
        processed = SimpleNamespace(num_choices=1, template=SimpleNamespace())
        trace.submitted(processed)
        traces.begin(1, "r", [(tracing.TRACEPARENT, processed.template.traceparent)])
        traces.note(unread(), now=1.0)


def unread() -> Iterator[EngineCoreOutput]:
    raise AssertionError("somebody has looked")
    yield
