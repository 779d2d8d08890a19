"""Spans of a share of the steps: `engine_core.step` with its phases, and links to the requests that were in it.

The busy loop draws, and looks up the requests of those steps that are drawn; a thread makes the spans. A step is not a
part of the traces of its requests: it serves many of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import Link, SpanContext

from engine_core.scheduler.output import SchedulerOutput
from engine_core.scheduler.request import RequestKey
from engine_core.step_times import StepStamps, kind_of
from stepwire import tracing

SPAN_NAME = "engine_core.step"
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Step:
    scheduler_output: SchedulerOutput
    requests: list[SpanContext]
    stamps: StepStamps
    done: float
    ended: float


class StepTraces:
    """`context_of` finds the span of a request that is traced, on any thread."""

    def __init__(
        self,
        detail: tracing.Detail,
        clock: tracing.WallClock,
        context_of: Callable[[RequestKey], SpanContext | None],
    ) -> None:
        self._detail = detail
        self._clock = clock
        self._context_of = context_of
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step-traces", daemon=True)
        self._thread.start()

    def note(self, scheduler_output: SchedulerOutput, stamps: StepStamps, done: float, ended: float) -> None:
        """A StepListener."""
        if self._detail.is_wanted():
            contexts = map(self._context_of, scheduler_output.num_scheduled_tokens)
            requests = [context for context in contexts if context is not None]
            self._steps.put(_Step(scheduler_output, requests, stamps, done, ended))

    def close(self) -> None:
        """Make the spans of what was noted."""
        self._steps.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            self._trace(step)

    def _trace(self, step: _Step) -> None:
        scheduler_output, stamps = step.scheduler_output, step.stamps
        attributes = {
            "step": scheduler_output.step,
            "kind": kind_of(scheduler_output).value,
            "tokens": scheduler_output.total_num_scheduled_tokens,
            "requests": len(scheduler_output.num_scheduled_tokens),
        }
        tracer, at = self._detail.tracer, self._clock.at
        links = [Link(context) for context in step.requests]
        span = tracer.start_span(SPAN_NAME, None, attributes=attributes, links=links, start_time=at(stamps.began))
        inside = trace.set_span_in_context(span)
        for name, begin, end in (
            ("schedule", stamps.began, stamps.planned),
            # From the handing over to the results; what samples is started meanwhile.
            ("execute", stamps.planned, step.done),
            ("sample", stamps.handed_over, stamps.sampled),
            ("update", step.done, step.ended),
        ):
            tracer.start_span(name, inside, start_time=at(begin)).end(at(end))
        span.end(at(step.ended))
