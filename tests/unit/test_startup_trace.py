"""Starts as traces: across processes by the environment, with the parts that each service has."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine_core.startup import STARTUP_PHASES
from engine_core.startup_trace import trace_startup
from stepwire import tracing
from stepwire.startup_trace import StartupTrace

OF_CALLER = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", provider.get_tracer("test"))
    monkeypatch.delenv("TRACEPARENT", raising=False)
    return exporter


def test_what_a_process_starts_is_a_part_of_its_start(exported, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = StartupTrace()
    for name, value in launcher.environment.items():
        monkeypatch.setenv(name, value)
    frontend = StartupTrace()
    frontend.begin("connect")
    trace_startup(dict.fromkeys(STARTUP_PHASES, 1.0), end=10.0)
    frontend.end(is_serving=True)
    launcher.end(is_serving=True)
    spans = exported.get_finished_spans()
    assert len({span.context.trace_id for span in spans}) == 1
    names = {span.context.span_id: span.name for span in spans}
    # The three starts are one below the other two, whose parts are their own.
    root = spans[-1]
    assert root.parent is None
    assert [span.name for span in spans if span.parent and span.parent.span_id == root.context.span_id] == [
        "startup",
        "startup",
    ]
    parts = [span.name for span in spans if span.parent and span.parent.span_id != root.context.span_id]
    assert parts == ["load_model", "profile_memory", "allocate_kv_cache", "warm_up", "connect"]
    assert all(names[span.parent.span_id] == "startup" for span in spans if span.parent)


def test_a_start_belongs_to_the_trace_of_the_environment(exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", OF_CALLER)
    StartupTrace().end(is_serving=True)
    (span,) = exported.get_finished_spans()
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == ("ab" * 16, "cd" * 8)


def test_without_export_the_trace_of_the_environment_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPARENT", OF_CALLER)
    assert StartupTrace().environment["TRACEPARENT"] == OF_CALLER
    monkeypatch.setenv("TRACEPARENT", "nonsense")
    assert StartupTrace().environment == {}


def test_a_start_that_is_stopped_is_a_failure_and_ends_once(exported) -> None:
    startup = StartupTrace()
    startup.begin("connect")
    startup.end(is_serving=False)
    startup.end(is_serving=True)
    assert [(span.name, span.status.is_ok) for span in exported.get_finished_spans()] == [
        ("connect", False),
        ("startup", False),
    ]
