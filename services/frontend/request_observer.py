"""What one request adds to the metrics: histograms, and each of its choices in an end counter exactly once.

Owner: the task of its handler. Times are our own monotonic clock, given as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from frontend.generation_events import Admitted, ChoiceDelta, ChoiceFinished, CollectorItem, FinishReason
from frontend.metrics import ModelMetrics

_FINISHED_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.REPETITION: "repetition",
}


class RequestObserver:
    """Call `observe` with everything the handler gets, and `close` once. A `trace_id` makes it an exemplar."""

    def __init__(
        self,
        metrics: ModelMetrics,
        arrival: float,
        num_choices: int,
        num_prompt_tokens: int,
        max_tokens: int,
        trace_id: str = "",
    ) -> None:
        # Of the engine that runs it, which may change until it is admitted.
        self.metrics = metrics
        self._arrival = arrival
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._trace_id = trace_id
        self._num_tokens = [0] * num_choices
        # Of each choice: when its first and its newest tokens came, and how many came first.
        self._first_token = [0.0] * num_choices
        self._last_token: list[float | None] = [None] * num_choices
        self._num_first = [0] * num_choices
        self._num_unfinished = num_choices
        self._has_tokens = False
        # Of the choices that have ended.
        self._finish_reasons: dict[int, str] = {}

    def observe(self, items: Sequence[CollectorItem], now: float) -> None:
        """Take what the handler got."""
        for item in items:
            if isinstance(item, ChoiceDelta):
                self._observe_delta(item, now)
            elif isinstance(item, ChoiceFinished):
                self._num_unfinished -= 1
                self._finish_reasons[item.choice] = item.reason.value
                self._num_tokens[item.choice] = item.num_output_tokens
                if item.num_output_tokens:
                    # It may have been a stop token alone, which shows in no delta.
                    self._note_tokens(now)
                self.metrics.finished[_FINISHED_REASONS[item.reason]].inc()
            elif isinstance(item, Admitted):
                self.metrics.admission.observe(now - self._arrival)

    def finish_reasons(self, otherwise: str) -> list[str]:
        """Of each choice; `otherwise` of those that had no end of their own."""
        return [self._finish_reasons.get(choice, otherwise) for choice in range(len(self._num_tokens))]

    def close(self, finished_reason: str, now: float, num_merged: int = 0) -> None:
        """The request is over; `finished_reason` goes for the choices that had no end of their own.

        `num_merged` pieces of its output were merged into others.
        """
        metrics = self.metrics
        metrics.finished[finished_reason].inc(self._num_unfinished)
        metrics.choices.observe(len(self._num_tokens))
        metrics.prompt_tokens.observe(self._num_prompt_tokens)
        metrics.max_tokens.observe(self._max_tokens)
        metrics.generation_tokens.observe(sum(self._num_tokens))
        metrics.max_generation_tokens.observe(max(self._num_tokens))
        metrics.duration.observe_traced(now - self._arrival, self._trace_id)
        metrics.deltas_merged.inc(num_merged)
        self._observe_token_time()

    def _observe_token_time(self) -> None:
        """Of the tokens that came after the first of their choice; a request without any has no mean."""
        num_later = sum(self._num_tokens) - sum(self._num_first)
        if num_later > 0:
            both = zip(self._first_token, self._last_token, strict=True)
            seconds = sum(last - first for first, last in both if last is not None)
            self.metrics.time_per_token.observe(seconds / num_later)

    def _observe_delta(self, delta: ChoiceDelta, now: float) -> None:
        choice = delta.choice
        last = self._last_token[choice]
        if last is not None:
            self.metrics.inter_token_latency.observe(now - last)
        else:
            self._first_token[choice], self._num_first[choice] = now, delta.num_tokens
            self._note_tokens(now)
        self._last_token[choice] = now
        self._num_tokens[choice] += delta.num_tokens

    def _note_tokens(self, now: float) -> None:
        if not self._has_tokens:
            self._has_tokens = True
            self.metrics.time_to_first_token.observe_traced(now - self._arrival, self._trace_id)
