"""What a trace shows of one request: attributes of the `llm_request` span, and its part that waits for an engine.

A call with several prompts is one `llm_request` with a part for each: what is true of one request alone is shown there.

Names are those of OpenTelemetry's conventions for generative AI.

Owner: the task of its handler. Where the request is in no trace nothing is made; where it is not recorded here, the
caller's context goes on to the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from frontend.call_trace import CURRENT_CALL, CallTrace, GenerationEnd, latency_attributes, result_attributes
from frontend.engine_client.clock_offset import ClockOffset
from frontend.engine_client.engine_facts import EngineFacts
from frontend.estimated_events import SpanTimes, place_events
from frontend.input_processor import ProcessedRequest
from frontend.output_collector import OutputCollector
from stepwire import tracing
from stepwire.errors import StepwireError

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

SPAN_NAME = "llm_request"
ENGINE_SPAN_NAME = "engine_core.request"


@contextmanager
def start_request_span(parent: Context | None, attributes: Mapping[str, AttributeValue]) -> Iterator[Span]:
    """The server span of one call, current in the block. It has no text of exceptions, which may quote a caller."""
    call = CallTrace()
    token = CURRENT_CALL.set(call)
    try:
        with tracing.tracer.start_as_current_span(
            SPAN_NAME, parent, SpanKind.SERVER, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            finally:
                if span.is_recording():
                    span.set_attributes(call.attributes())
    finally:
        CURRENT_CALL.reset(token)


def set_error_type(error: StepwireError) -> None:
    """The call of the current span ends with this error."""
    trace.get_current_span().set_attribute("error.type", error.reason)


class RequestTrace:
    """`submitted` when the request goes to an engine, `close` at its end."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._span = trace.get_current_span()
        self._call = CURRENT_CALL.get() or CallTrace()
        self._place = self._call.begin(request_id)
        self._arrival = time.monotonic()
        self._engine_span: Span = trace.INVALID_SPAN
        # Of that span, where it is recorded.
        self._times: SpanTimes | None = None

    @property
    def trace_id(self) -> str:
        """Hexadecimal, for whoever looks for an example; empty when the request is in no trace that is kept."""
        return f"{self._span.get_span_context().trace_id:032x}" if self._span.is_recording() else ""

    @property
    def is_recorded(self) -> bool:
        """The engine's work is shown, with what happens to the request there if nobody else shows it."""
        return self._engine_span.is_recording()

    def submitted(self, processed: ProcessedRequest) -> None:
        """Put the context of a new span for the engine's work into the engine's message."""
        if not self._span.get_span_context().is_valid:
            return
        self._engine_span = tracing.tracer.start_span(ENGINE_SPAN_NAME, kind=SpanKind.CLIENT)
        if self.is_recorded:
            self._times = SpanTimes(time.monotonic())
        template = processed.template
        template.traceparent, template.tracestate = tracing.inject(self._engine_span)
        if self._span.is_recording():
            self._span.set_attributes(_request_attributes(processed))
            facts: dict[str, AttributeValue] = {
                "gen_ai.request.max_tokens": processed.max_tokens,
                "gen_ai.request.seed": processed.seed,
            }
            self._call.note(self._place, facts)
            self._engine_span.set_attributes({"gen_ai.request.id": self._request_id, **facts})

    def fail(self, error: StepwireError) -> None:
        """The request ends with this error."""
        self._span.set_attribute("error.type", error.reason)
        self._engine_span.set_attribute("error.type", error.reason)
        self._engine_span.set_status(Status(StatusCode.ERROR))

    def close(
        self,
        engine: EngineFacts | None,
        collected: OutputCollector | None,
        finish_reasons: Sequence[str],
        clock: ClockOffset | None = None,
    ) -> None:
        """Without `collected` it never reached an engine; `finish_reasons` has one for each choice.

        With the engine's clock its events are shown here, unless it does so itself.
        """
        if self._span.is_recording() and collected is not None:
            now = time.monotonic()
            end = GenerationEnd(finish_reasons, collected.usage, collected.timings, now - self._arrival)
            where = _engine_attributes(engine)
            self._call.end(self._place, end)
            self._call.note(self._place, where)
            self._engine_span.set_attributes({**where, **result_attributes([end]), **latency_attributes(end)})
            if self._times is not None and clock is not None and engine is not None and not engine.is_tracing:
                has_choices = len(finish_reasons) > 1
                place_events(self._engine_span, self._times, collected.events, clock, now, has_choices=has_choices)
        self._engine_span.end()


def _engine_attributes(engine: EngineFacts | None) -> dict[str, AttributeValue]:
    return {} if engine is None else {"stepwire.engine_id": engine.engine_id, "stepwire.boot_id": engine.boot_id}


def _request_attributes(processed: ProcessedRequest) -> dict[str, AttributeValue]:
    sampling = processed.template.sampling
    return {
        "gen_ai.request.model": processed.model,
        "gen_ai.response.model": processed.model,
        # All of them, 0 included: the engine's message has every default resolved.
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.n": processed.num_choices,
        "gen_ai.request.choice.count": processed.num_choices,
        "stepwire.priority": processed.template.priority,
        "stepwire.client_class": processed.template.client_class,
    }
