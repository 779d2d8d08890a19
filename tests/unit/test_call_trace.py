"""What the span of one call shows of the generations that it is made of."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fakes.text_requests import make_request
from frontend.api.tracing import address_of
from frontend.call_trace import name_call
from frontend.generation_events import Timings, Usage
from frontend.request_trace import ENGINE_SPAN_NAME, SPAN_NAME, RequestTrace, start_request_span

ALL_TIMES = Timings(queued_ns=1, prefill_ns=2, decode_ns=3, ttft_ns=4, preemptions=1)
LATENCY = "gen_ai.latency."


def generate(
    name: str,
    num_choices: int,
    usage: Usage,
    timings: Timings = ALL_TIMES,
    ended: tuple[int, ...] = (),
    engine: str = "engine",
    seed: int = 0,
):
    """One generation, some of whose choices end by themselves."""
    reasons = ["stop" if choice in ended else "abort" for choice in range(num_choices)]
    trace = RequestTrace(name)
    trace.submitted(make_request(num_choices=num_choices, seed=seed))
    where = SimpleNamespace(engine_id=engine, boot_id=f"boot of {engine}")
    trace.close(where, SimpleNamespace(usage=usage, timings=timings), reasons)


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
        RequestTrace("r").close(None, None, ["error"])
    found = attributes_of(exported)
    assert found["gen_ai.request.id"] == "r"
    assert "gen_ai.usage.input_tokens" not in found


def test_every_prompt_of_a_call_has_a_span_with_what_is_its_own_and_the_call_shows_what_all_have(exported) -> None:
    with start_request_span(None, {}):
        name_call("r")
        generate("r-0", 1, Usage(5, 2, 0), ended=(0,), engine="a", seed=7)
        generate("r-1", 1, Usage(6, 3, 0), engine="b", seed=7)
    found = attributes_of(exported)
    assert (found["gen_ai.request.id"], found["gen_ai.response.id"], found["gen_ai.request.seed"]) == ("r", "r", 7)
    assert {"stepwire.engine_id", "stepwire.boot_id"}.isdisjoint(found)
    parts = [span.attributes or {} for span in exported.get_finished_spans() if span.name == ENGINE_SPAN_NAME]
    shown = ("gen_ai.request.id", "stepwire.engine_id", "stepwire.boot_id", "gen_ai.usage.output_tokens")
    assert [tuple(part[name] for name in shown) for part in parts] == [
        ("r-0", "a", "boot of a", 2),
        ("r-1", "b", "boot of b", 3),
    ]
    assert [part["gen_ai.response.finish_reasons"] for part in parts] == [("stop",), ("abort",)]
    assert all(f"{LATENCY}e2e" in part for part in parts)


def test_a_call_of_one_prompt_shows_its_engine(exported) -> None:
    with start_request_span(None, {}):
        generate("r", 1, Usage(5, 2, 0), seed=3)
    found = attributes_of(exported)
    assert (found["stepwire.engine_id"], found["stepwire.boot_id"]) == ("engine", "boot of engine")
    assert (found["gen_ai.request.id"], found["gen_ai.request.seed"]) == ("r", 3)


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.0.0.7:123", "10.0.0.7"), ("ipv6:%5B::1%5D:55", "::1"), ("ipv6:[::1]:55", "::1"), ("unix:", "unix:")],
)
def test_the_address_of_a_caller_has_no_port(peer: str, address: str) -> None:
    assert address_of(peer) == address
