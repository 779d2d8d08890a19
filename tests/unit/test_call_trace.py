"""What the span of one call shows of the generations that it is made of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fakes.text_requests import make_request
from frontend.generation_events import ChoiceFinished, FinishReason, Timings, Usage
from frontend.request_trace import SPAN_NAME, RequestTrace, start_request_span
from stepwire import tracing

ALL_TIMES = Timings(queued_ns=1, prefill_ns=2, decode_ns=3, ttft_ns=4, preemptions=1)
LATENCY = "gen_ai.latency."


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", provider.get_tracer("test"))
    return exporter


def generate(name: str, num_choices: int, usage: Usage, timings: Timings = ALL_TIMES, ended: tuple[int, ...] = ()):
    """One generation, some of whose choices end by themselves."""
    trace = RequestTrace(name)
    trace.submitted(make_request(num_choices=num_choices))
    trace.observe([ChoiceFinished(choice, FinishReason.STOP, None, 1) for choice in ended])
    trace.close("engine", SimpleNamespace(usage=usage, timings=timings), "abort")


def attributes_of(exporter: InMemorySpanExporter) -> dict[str, object]:
    (span,) = (span for span in exporter.get_finished_spans() if span.name == SPAN_NAME)
    return dict(span.attributes or {})


async def test_the_usage_of_a_call_is_the_sum_over_its_prompts_and_no_latency_is_shown(exported) -> None:
    async def one(number: int) -> None:
        # The others begin when the first has ended: what it shows must not depend on that.
        generate(str(number), 1, Usage(10 * number, number, 1), ended=(0,))

    with start_request_span(None, {}):
        await asyncio.create_task(one(1))
        await asyncio.gather(asyncio.create_task(one(2)), asyncio.create_task(one(3)))
    found = attributes_of(exported)
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (60, 6)
    assert (found["stepwire.cached_prompt_tokens"], found["stepwire.preemptions"]) == (3, 3)
    assert found["gen_ai.response.finish_reasons"] == ("stop",) * 3
    assert not [name for name in found if name.startswith(LATENCY)]


def test_two_calls_share_nothing(exported) -> None:
    for number in (1, 2):
        with start_request_span(None, {}):
            generate(str(number), 1, Usage(5, 1, 0))
    spans = [span for span in exported.get_finished_spans() if span.name == SPAN_NAME]
    assert [span.attributes["gen_ai.usage.input_tokens"] for span in spans] == [5, 5]


def test_every_choice_has_a_finish_reason_also_when_it_has_not_finished(exported) -> None:
    with start_request_span(None, {}):
        generate("r", 3, Usage(1, 1, 0), ended=(1,))
    assert attributes_of(exported)["gen_ai.response.finish_reasons"] == ("abort", "stop", "abort")


def test_times_that_were_not_reached_are_left_out(exported) -> None:
    with start_request_span(None, {}):
        generate(
            "r", 1, Usage(1, 0, 0), Timings(queued_ns=500_000_000, prefill_ns=0, decode_ns=0, ttft_ns=0, preemptions=0)
        )
    latencies = {name: value for name, value in attributes_of(exported).items() if name.startswith(LATENCY)}
    assert set(latencies) == {f"{LATENCY}time_in_queue", f"{LATENCY}e2e"}
    assert latencies[f"{LATENCY}time_in_queue"] == 0.5


def test_a_call_that_reached_no_engine_shows_no_usage(exported) -> None:
    with start_request_span(None, {}):
        RequestTrace("r").close("", None, "error")
    assert "gen_ai.usage.input_tokens" not in attributes_of(exported)
