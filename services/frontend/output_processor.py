"""From engine outputs to what callers read: the one loop over a batch, and the maps of everything in flight.

Runs on the event loop only (offline: in the caller's thread) and never waits for a client. Each request has its own
guard: whatever goes wrong with one ends that one, and the batch goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from frontend.abort_kind import AbortKind
from frontend.choice_state import ChoiceState
from frontend.engine_outputs import EngineFinishReason, EngineOutput
from frontend.generation_events import ChoiceFinished
from frontend.input_processor.processed_request import ProcessedRequest
from frontend.logprobs import PromptLogprobs
from frontend.output_collector import OutputCollector
from frontend.output_parsers.reasoning import ReasoningParser
from frontend.parallel_sampling import RequestState
from frontend.processing_failures import Stage, note_failure
from frontend.request_stats import RequestStats
from frontend.retry_advice import RETRY_AFTER_MS
from frontend.text_times import TextTimes
from frontend.tokenizer import Tokenizer
from stepwire.errors import RequestFailedError, StepwireError, UnavailableError

# Outputs between two yields to the event loop, so that a large batch does not delay everything else.
SLICE = 128


class OutputProcessor:
    """Turns engine outputs into deltas, one collector a request. `on_abort` must not block: it queues an abort.

    `on_failure` is called for each request whose output failed, with the stage that failed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        on_abort: Callable[[list[int], AbortKind], None],
        on_failure: Callable[[Stage], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        times: TextTimes | None = None,
    ) -> None:
        self._times = times or TextTimes()
        # Of the batch that is being taken in.
        self._detokenize_s = 0.0
        self._tokenizer = tokenizer
        self._on_abort = on_abort
        self._on_failure = on_failure
        self._clock = clock
        # Live handles; one goes with its end.
        self._choices: dict[int, tuple[RequestState, ChoiceState]] = {}
        # Requests whose handler has not closed its collector.
        self._requests: dict[OutputCollector, RequestState] = {}

    @property
    def num_requests(self) -> int:
        """Requests whose handler is still at work."""
        return len(self._requests)

    @property
    def num_choices(self) -> int:
        """Choices that are live in an engine."""
        return len(self._choices)

    def add_request(
        self,
        request: ProcessedRequest,
        handles: list[int],
        new_reasoning: Callable[[], ReasoningParser | None] = lambda: None,
    ) -> OutputCollector:
        """Register a request before it is submitted, one handle a choice. The handler must `close` what it gets.

        `new_reasoning` makes the parser of a choice in which stop strings do not count.
        """
        stats = RequestStats(len(request.prompt_token_ids), request.arrival_time)
        collector = OutputCollector(
            len(handles),
            stats,
            min_chunk_tokens=request.output.min_chunk_tokens,
            max_chunk_delay_s=request.output.max_chunk_delay_s,
            clock=self._clock,
        )
        state = RequestState(request.log_fields, handles, collector, stats, _prompt_logprobs(request, handles[0]))
        first = ChoiceState(request, 0, self._tokenizer, reasoning=new_reasoning())
        others = [
            ChoiceState(request, choice, self._tokenizer, first, new_reasoning()) for choice in range(1, len(handles))
        ]
        self._requests[collector] = state
        self._choices.update(
            (handle, (state, choice)) for handle, choice in zip(handles, (first, *others), strict=True)
        )
        return collector

    async def process_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Take a batch. Handles that are not known were ended here before; their outputs are late and skipped."""
        for start in range(0, len(outputs), SLICE):
            if start:
                await asyncio.sleep(0)
            self.process_now(outputs[start : start + SLICE])

    def process_now(self, outputs: Sequence[EngineOutput]) -> None:
        """The same without a yield, for a caller that has no other streams to serve meanwhile."""
        stopped: list[int] = []
        began, self._detokenize_s = time.perf_counter(), 0.0
        for output in outputs:
            entry = self._choices.get(output.handle)
            if entry is None:
                continue
            state, choice = entry
            try:
                if not self._take_plain(state, choice, output):
                    self._process(state, choice, output, stopped)
            # The guard: nothing that one request can cause may reach the others.
            except Exception as exception:
                self._end(state, self.failed(exception, state.log_fields), AbortKind.FRONTEND_ERROR)
        if stopped:
            self._on_abort(stopped, AbortKind.STOP_STRING)
        self._times.processing.observe(time.perf_counter() - began)
        if self._detokenize_s:
            self._times.detokenize.observe(self._detokenize_s)

    def failed(self, exception: Exception, log_fields: Mapping[str, str]) -> RequestFailedError:
        """Count and log what was raised by one request's output, here or further on; returns what ends that request."""
        self._on_failure(note_failure(exception, log_fields))
        return RequestFailedError("the output of this request could not be processed", reason="OUTPUT_PROCESSING")

    def fail(self, handles: Iterable[int], error: StepwireError) -> None:
        """End the requests of handles that no engine runs any more; siblings that still run are aborted."""
        lost = list(handles)
        entries = [self._choices.pop(handle) for handle in lost if handle in self._choices]
        for state in dict.fromkeys(state for state, _ in entries):
            state.live_handles.difference_update(lost)
            self._end(state, error, AbortKind.REQUESTED)

    def abort(self, collector: OutputCollector) -> None:
        """An Abort call: the engine ends the choices, and each is then reported CANCELLED."""
        state = self._requests.get(collector)
        # Asked for again, it is on its way already.
        if state is not None and state.live_handles and not state.is_abort_requested:
            state.is_abort_requested = True
            self._on_abort(sorted(state.live_handles), AbortKind.REQUESTED)

    def close(self, collector: OutputCollector) -> list[int]:
        """Forget a request; for the handler's `finally`. Returns the handles the caller must abort; may be repeated."""
        state = self._requests.pop(collector, None)
        return self._forget(state) if state is not None else []

    def find_slow(self, *, max_unread_bytes: int, max_unread_s: float) -> list[OutputCollector]:
        """Collectors whose handler leaves too much unread, has read nothing for too long, or is stuck in a write."""
        limit = self._clock() - max_unread_s
        return [collector for collector in self._requests if _is_slow(collector, max_unread_bytes, limit)]

    def _take_plain(self, state: RequestState, choice: ChoiceState, output: EngineOutput) -> bool:
        """The short way of the common case, a token in the middle of an answer; False = it is another."""
        token_ids = output.new_token_ids
        if len(token_ids) != 1 or output.has_news or not state.is_streaming:
            return False
        text = choice.take_plain(token_ids[0])
        if not text:
            return False
        state.stats.note_plain_token(output.monotonic_ns)
        state.collector.push(choice.choice, text, token_ids if choice.shows_token_ids else (), 1)
        return True

    def _process(self, state: RequestState, choice: ChoiceState, output: EngineOutput, stopped: list[int]) -> None:
        if output.events or output.finish is not None or output.cached_prompt_tokens is not None:
            state.stats.note_news(output, choice.choice)
        if output.new_token_ids:
            state.stats.note_tokens(output.monotonic_ns)
            if not state.stats.has_tokens:
                state.stats.note_first_token(self._clock())
        if state.is_failure(output):
            self._drop(state, output.handle)
            self._end(state, _error_of(output), AbortKind.REQUESTED)
            return
        # Any news but a refusal means that the engine has queued it.
        state.note_admitted(output.handle)
        state.note_prompt(output)
        began = time.perf_counter()
        news = choice.process(output)
        self._detokenize_s += time.perf_counter() - began
        state.stats.add_completion_tokens(news.num_billed)
        if news.text or news.token_ids or news.num_tokens:
            state.collector.push(choice.choice, news.text, news.token_ids, news.num_tokens, news.logprobs)
        if news.reason is not None:
            self._drop(state, output.handle)
            if output.finish is None:
                stopped.append(output.handle)
            state.collector.finish(
                ChoiceFinished(choice.choice, news.reason, news.stop_match, choice.num_output_tokens, output.pooled)
            )

    def _end(self, state: RequestState, error: StepwireError, kind: AbortKind) -> None:
        """Fail a request as a whole and end in the engine what still runs of it."""
        state.collector.fail(error)
        live = self._forget(state)
        if live:
            self._on_abort(live, kind)

    def _forget(self, state: RequestState) -> list[int]:
        live = state.take_live_handles()
        for handle in live:
            del self._choices[handle]
        return live

    def _drop(self, state: RequestState, handle: int) -> None:
        state.live_handles.discard(handle)
        del self._choices[handle]


def _prompt_logprobs(request: ProcessedRequest, handle: int) -> PromptLogprobs | None:
    num_top = request.output.num_prompt_logprobs
    return None if num_top is None else PromptLogprobs(handle, len(request.prompt_token_ids), 1 + num_top)


def _error_of(output: EngineOutput) -> StepwireError:
    if output.finish is not None and output.finish.error is not None:
        return output.finish.error
    if output.finish is not None and output.finish.reason is EngineFinishReason.ABORTED:
        # Nobody here asked for it: the drain time of the engine is over, or an operator has paused it with ABORT.
        text = "the engine ended the request: it is shutting down, or was paused"
        return UnavailableError(text, reason="DRAINING", retry_after_ms=RETRY_AFTER_MS)
    return RequestFailedError("the engine failed on this request and gave no reason")


def _is_slow(collector: OutputCollector, max_unread_bytes: int, oldest_allowed: float) -> bool:
    since = collector.oldest_unread_time
    if since is not None and (collector.unread_bytes > max_unread_bytes or since < oldest_allowed):
        return True
    # Behind the last output nothing is left to be unread.
    return collector.busy_since is not None and collector.busy_since < oldest_allowed
