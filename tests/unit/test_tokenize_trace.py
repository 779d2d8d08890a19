"""When turning a prompt into tokens has a span of its own."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from fakes.small_tokenizer import byte_level_tokenizer
from frontend.input_processor import InputProcessor, ModelFacts
from frontend.request_trace import start_request_span
from frontend.tokenize_trace import SPAN_NAME, trace_tokenize
from stepwire import tracing
from stepwire.v1.generation_service_pb2 import GenerateRequest


@pytest.mark.parametrize(
    ("duration_s", "ratio", "is_shown"), [(0.006, 0.0, True), (0.004, 0.0, False), (0.004, 1.0, True)]
)
def test_long_work_has_a_span_and_short_work_only_in_detail(
    exported, monkeypatch: pytest.MonkeyPatch, duration_s: float, ratio: float, is_shown: bool
) -> None:
    monkeypatch.setattr(tracing.detail, "ratio", ratio)
    with start_request_span(None, {}) as request_span:
        trace_tokenize(duration_s, 7)
    spans = [span for span in exported.get_finished_spans() if span.name == SPAN_NAME]
    assert len(spans) == is_shown
    for span in spans:
        assert span.parent == request_span.get_span_context()
        assert span.attributes == {"gen_ai.usage.input_tokens": 7}
        assert span.end_time - span.start_time == pytest.approx(duration_s * 1e9, abs=1000)


def test_a_request_that_is_not_traced_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "tracer", TracerProvider(sampler=ALWAYS_OFF).get_tracer("test"))
    monkeypatch.setattr(tracing.detail, "is_wanted", lambda: pytest.fail("somebody has asked"))
    with start_request_span(None, {}):
        trace_tokenize(1.0, 7)


def test_the_tokens_of_a_text_are_what_is_traced(exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing.detail, "ratio", 1.0)
    facts = ModelFacts(served_model_name="small", max_model_len=100, vocab_size=293, kv_cache_tokens=80)
    processor = InputProcessor(byte_level_tokenizer(), facts)

    async def both() -> None:
        with start_request_span(None, {}):
            await processor.process(GenerateRequest(text="hello"), request_id="r")
            # Nothing is tokenized here.
            await processor.process(GenerateRequest(token_ids={"ids": [1, 2]}), request_id="r")

    asyncio.run(both())
    processor.close()
    assert [span.name for span in exported.get_finished_spans()] == [SPAN_NAME, "llm_request"]
