"""One request of a caller from the door to its only end. Owner: the task of its RPC handler, on the event loop.

Made by `LLMFrontend.generation`, which also ends it: whatever happens to the handler, the engine is told in the same
turn of the loop, without an await.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from frontend.abort_kind import AbortKind
from frontend.access.caller import Caller
from frontend.admission import Permit
from frontend.engine_client.engine_facts import EngineFacts, EngineLoad
from frontend.engine_client.outbox import NewRequest
from frontend.engine_client.pool import EnginePool
from frontend.generation_events import Admitted, CollectorItem, Timings, Usage
from frontend.input_processor import ProcessedRequest
from frontend.input_processor.processor import DEADLINE_MARGIN_S
from frontend.metrics import ModelMetrics
from frontend.output_collector import OutputCollector
from frontend.output_parsers.reasoning import ReasoningParser
from frontend.request_observer import RequestObserver
from frontend.request_trace import RequestTrace
from frontend.serving_model import ServingModel
from stepwire.errors import RequestFailedError, StepwireError, UnavailableError

logger = logging.getLogger(__name__)

# An engine that replaces another model is ready at once.
RETRY_AFTER_MS = 100
_NS_PER_MS = 1_000_000


class ClientGoneError(Exception):
    """The connection to the caller broke while an answer was written; nobody is there to be told."""


class Generation:
    """What a handler works with: `submit` once, then `next` until it returns nothing."""

    def __init__(
        self,
        request_id: str,
        caller: Caller,
        model: ServingModel,
        permit: Permit,
        pool: EnginePool,
        metrics_of: Callable[[str, str], ModelMetrics],
        deadline_in_s: float | None,
        write_timeout_s: float,
    ) -> None:
        self.request_id = request_id
        # For what is written when it has ended: until then `cut` bounds every write.
        self.write_timeout_s = write_timeout_s
        self.caller = caller
        self.model = model
        self.collector: OutputCollector | None = None
        # The engine that runs it.
        self.engine: EngineFacts | None = None
        self.is_admitted = False
        # Tokens that were written to the caller; set by the handler.
        self.tokens_emitted = 0
        # Why the time limit expires, when it does.
        self.cut_error: StepwireError = RequestFailedError("the deadline has passed", reason="DEADLINE")
        self.cut_kind = AbortKind.DEADLINE
        left = None if deadline_in_s is None else max(0.0, deadline_in_s - DEADLINE_MARGIN_S)
        self.time_limit = asyncio.timeout(left)
        self.handles: list[int] = []
        self._permit = permit
        self._pool = pool
        self._metrics_of = metrics_of
        self._arrival = time.monotonic()
        self._observer: RequestObserver | None = None
        self.trace = RequestTrace(request_id)

    def submit(
        self,
        processed: ProcessedRequest,
        rank: int | None = None,
        *,
        new_reasoning: Callable[[], ReasoningParser | None] = lambda: None,
    ) -> None:
        """Send every choice to an engine, to one of this rank if the caller has named it.

        `new_reasoning` makes the parser of a choice in which stop strings do not count.
        Raises OverloadedError, UnavailableError or InvalidRequestError.
        """
        if self.model.is_retired:
            raise UnavailableError("the engines have just changed to another model", retry_after_ms=RETRY_AFTER_MS)
        num_prompt_tokens = processed.num_choices * len(processed.prompt_token_ids)
        self._permit.grow(processed.num_choices, len(processed.prompt_token_ids))
        if self.caller.use is not None:
            self.caller.use.take_prompt(num_prompt_tokens)
        # What the caller claims counts only where its token has no class.
        processed.template.client_class = self.caller.client_class or processed.template.client_class
        self.trace.submitted(processed)
        num_bytes = processed.size_for_engine()
        handles = self._pool.draw_handles(processed.num_choices)
        fields = processed.log_fields
        requests = [
            NewRequest(handle, num_bytes, partial(processed.fill, choice), fields)
            for choice, handle in enumerate(handles)
        ]
        requests[0] = requests[0]._replace(on_move=self._move)
        self._pool.submit(requests, rank)
        self.engine = self._pool.engine_of(handles[0])
        # No await in between: outputs can not come before the collector is there.
        self.handles = handles
        self.collector = self.model.output_processor.add_request(processed, handles, new_reasoning)
        if self.trace.is_recorded:
            self.collector.keep_events()
        metrics = self._metrics_of(processed.model, self.engine_id)
        self._observer = RequestObserver(
            metrics,
            self._arrival,
            processed.num_choices,
            len(processed.prompt_token_ids),
            processed.max_tokens,
            self.trace.trace_id,
        )

    async def next(self) -> Sequence[CollectorItem]:
        """The next news, at least one; none when every choice has ended. Raises whatever ended the request."""
        if self.collector is None:
            raise RuntimeError("submit comes first")
        items = await self.collector.next()
        if not self.is_admitted and items and isinstance(items[0], Admitted):
            self.is_admitted = True
        if self._observer is not None:
            self._observer.observe(items, time.monotonic())
        return items

    def _move(self, engine: EngineFacts) -> None:
        """Its engine did not take it, and this one gets it; what is counted from here on is counted there."""
        self.engine = engine
        if self._observer is not None:
            self._observer.metrics = self._metrics_of(self.model.facts.model, engine.engine_id)

    @property
    def engine_id(self) -> str:
        """Empty until the request was sent to an engine."""
        return self.engine.engine_id if self.engine else ""

    @property
    def engine_load(self) -> EngineLoad | None:
        """What its engine has last reported; None when that is gone."""
        return self._pool.load_of(self.engine_id)

    @property
    def system_fingerprint(self) -> str:
        """Of the engine that runs it: another of the pool may have another dtype or version."""
        return self.engine.fingerprint if self.engine else ""

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        return self._collected.usage

    @property
    def timings(self) -> Timings:
        """Durations so far."""
        return self._collected.timings

    @property
    def _collected(self) -> OutputCollector:
        if self.collector is None:
            raise RuntimeError("submit comes first")
        return self.collector

    def cut(self, error: StepwireError, kind: AbortKind) -> None:
        """End it from outside, wherever its handler is: also in the middle of a write that nobody reads."""
        self.cut_error, self.cut_kind = error, kind
        if not self.time_limit.expired():
            self.time_limit.reschedule(asyncio.get_running_loop().time())

    def abort(self) -> None:
        """An Abort call: what is there is delivered, and every live choice ends CANCELLED."""
        if self.collector is not None:
            self.model.output_processor.abort(self.collector)
        else:
            error = RequestFailedError("aborted by the caller before it reached an engine", reason="CANCELLED")
            self.cut(error, AbortKind.REQUESTED)

    def close(self, finished_reason: str) -> list[int]:
        """Let go of everything; returns the handles still to be aborted in the engine."""
        self._permit.release()
        num_merged = self.collector.num_merged if self.collector is not None else 0
        if self._observer is not None:
            self._observer.close(finished_reason, time.monotonic(), num_merged)
        elif finished_reason != "rejected":
            # It ended before it reached an engine, and has an end all the same.
            metrics = self._metrics_of(self.model.facts.model, "")
            metrics.finished[finished_reason].inc()
            metrics.duration.observe(time.monotonic() - self._arrival)
        observed = self._observer
        reasons = [finished_reason] if observed is None else observed.finish_reasons(finished_reason)
        self.trace.close(self.engine, self.collector, reasons, self._pool.clock_of(self.engine))
        if logger.isEnabledFor(logging.DEBUG):
            self._log_end(reasons)
        if self.collector is None:
            return self.handles
        if self.caller.use is not None:
            self.caller.use.count_tokens(self.usage.completion_tokens)
        return self.model.output_processor.close(self.collector)

    def _log_end(self, finish_reasons: Sequence[str]) -> None:
        """The one line about a request; a reason for each choice."""
        facts = {"request_id": self.request_id, "model": self.model.facts.model, "engine_id": self.engine_id}
        if self.collector is not None:
            usage, timings = self.usage, self.timings
            counts = {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "queue_ms": timings.queued_ns // _NS_PER_MS,
                "prefill_ms": timings.prefill_ns // _NS_PER_MS,
                "decode_ms": timings.decode_ns // _NS_PER_MS,
                "ttft_ms": timings.ttft_ns // _NS_PER_MS,
            }
            facts |= {name: str(count) for name, count in counts.items()}
        logger.debug("request ended", extra={**facts, "finish_reason": ",".join(finish_reasons)})
