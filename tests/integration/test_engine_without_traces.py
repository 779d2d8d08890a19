"""Events of an engine that does not trace, on the frontend's span: over a real stream, by another machine's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fakes.fake_engine import WAIT_S, FakeEngine
from frontend.engine_client.clock_offset import ClockOffset
from running_frontend import SERVING, Stream, request, running_frontend
from stepwire.engine.v1 import engine_core_pb2

# The machine of the engine has been up for four months longer.
AHEAD_NS = 10_000_000 * 1_000_000_000
NAMES = ["QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED"]
Serve = Callable[..., Awaitable[ReadableSpan]]


@pytest.fixture
def serve(engine: FakeEngine, exported: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """One request, behind the first pong; its span of the engine's work.

    `has_pauses`: as long as that ping has taken, before the request is scheduled and before its last token.
    """
    has_pong, note = asyncio.Event(), ClockOffset.note
    round_trip_s = 0.0

    def note_and_tell(clock: ClockOffset, sent: float, received: float, engine_ns: int) -> None:
        nonlocal round_trip_s
        note(clock, sent, received, engine_ns)
        round_trip_s = max(round_trip_s, received - sent)
        has_pong.set()

    async def pause_twice(stream: Stream) -> None:
        await stream.next()
        for _ in range(2):
            await asyncio.sleep(round_trip_s)
            engine.may_step.set()
            await engine.wait_until(lambda: not engine.may_step.is_set())

    def halt_at_the_ends(add: engine_core_pb2.EngineCoreRequest, index: int) -> None:
        if index in (0, 2):
            engine.may_step.clear()

    async def serve_one(*, has_pauses: bool = False, **fields: object) -> ReadableSpan:
        async with running_frontend(engine.endpoint, cache_dir=tmp_path) as frontend:
            await frontend.wait_for_health(SERVING)
            if engine.answers_pings:
                await asyncio.wait_for(has_pong.wait(), WAIT_S)
            if has_pauses:
                engine.may_step.clear()
                engine.fail = halt_at_the_ends
            stream = frontend.stream(request(max_tokens=3, **fields))
            if has_pauses:
                await pause_twice(stream)
            await stream.rest()
            await frontend.wait_idle()
        (span,) = (span for span in exported.get_finished_spans() if span.name == "engine_core.request")
        return span

    monkeypatch.setattr(ClockOffset, "note", note_and_tell)
    return serve_one


async def test_they_are_there_in_order_and_within_the_span(engine: FakeEngine, serve: Serve) -> None:
    engine.clock_ahead_ns = AHEAD_NS
    # An estimate is off by half a round trip at most: its events stay apart.
    span = await serve(has_pauses=True)
    assert [event.name for event in span.events] == NAMES
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)
    # Not all at one end of it, as times of another clock would be.
    assert len(set(times)) > len(NAMES)
    assert span.events[-1].attributes == {"reason": "length"}
    assert span.attributes["stepwire.clock"] == "estimated"


async def test_each_choice_has_its_own(serve: Serve) -> None:
    span = await serve(sampling={"n": 2, "temperature": 1})
    for choice in range(2):
        assert [event.name for event in span.events if event.attributes["choice"] == choice] == NAMES


@pytest.mark.parametrize("why", ["it traces", "no pong has come"])
async def test_there_are_none(engine: FakeEngine, serve: Serve, why: str) -> None:
    if why == "it traces":
        engine.ready.features.append("tracing")
    engine.answers_pings = why == "it traces"
    span = await serve()
    assert span.events == ()
    assert "stepwire.clock" not in span.attributes
