"""Events of an engine that does not trace, on the frontend's span: over a real stream, by another machine's clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fakes.fake_engine import WAIT_S, FakeEngine
from running_frontend import SERVING, RunningFrontend, request, running_frontend

# The machine of the engine has been up for four months longer.
AHEAD_NS = 10_000_000 * 1_000_000_000
NAMES = ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"]


async def engine_span(
    engine: FakeEngine, exported: InMemorySpanExporter, cache_dir: Path, **fields: object
) -> ReadableSpan:
    """That of one request, behind the first pong."""
    async with running_frontend(engine.endpoint, cache_dir=cache_dir) as frontend:
        await frontend.wait_for_health(SERVING)
        if engine.answers_pings:
            await first_pong(frontend)
        await frontend.stream(request(max_tokens=3, **fields)).rest()
        await frontend.wait_idle()
    (span,) = (span for span in exported.get_finished_spans() if span.name == "engine_core.request")
    return span


async def first_pong(frontend: RunningFrontend) -> None:
    async with asyncio.timeout(WAIT_S):
        while frontend.process.frontend.pool.clock_of(frontend.process.frontend.model.facts) is None:
            await asyncio.sleep(0)


async def test_they_are_there_in_order_and_within_the_span(
    engine: FakeEngine, exported: InMemorySpanExporter, tmp_path: Path
) -> None:
    engine.clock_ahead_ns = AHEAD_NS
    span = await engine_span(engine, exported, tmp_path)
    assert [event.name for event in span.events] == NAMES
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)
    # Not all at one end of it, as times of another clock would be.
    assert span.events[0].timestamp < span.end_time
    assert span.events[-1].timestamp > span.start_time
    assert span.events[-1].attributes == {"reason": "length"}
    assert span.attributes["stepwire.clock"] == "estimated"


async def test_each_choice_has_its_own(engine: FakeEngine, exported: InMemorySpanExporter, tmp_path: Path) -> None:
    span = await engine_span(engine, exported, tmp_path, sampling={"n": 2, "temperature": 1})
    for choice in range(2):
        assert [event.name for event in span.events if event.attributes["choice"] == choice] == NAMES


@pytest.mark.parametrize("why", ["it traces", "no pong has come"])
async def test_there_are_none(engine: FakeEngine, exported: InMemorySpanExporter, tmp_path: Path, why: str) -> None:
    if why == "it traces":
        engine.ready.features.append("tracing")
    engine.answers_pings = why == "it traces"
    span = await engine_span(engine, exported, tmp_path)
    assert span.events == ()
    assert "stepwire.clock" not in span.attributes
