"""What one request adds to the metrics: histograms, and each of its choices in an end counter exactly once.

Owner: the task of its handler. Times are our own monotonic clock, given as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from frontend.generation_events import ChoiceDelta, ChoiceFinished, CollectorItem, FinishReason
from frontend.metrics import ModelMetrics

_FINISHED_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.REPETITION: "repetition",
}


class RequestObserver:
    """Call `observe` with everything the handler gets, and `close` once."""

    def __init__(self, metrics: ModelMetrics, arrival: float, num_choices: int, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = [0] * num_choices
        self._last_token: list[float | None] = [None] * num_choices
        self._num_unfinished = num_choices
        self._has_tokens = False

    def observe(self, items: Sequence[CollectorItem], now: float) -> None:
        """Take what the handler got."""
        for item in items:
            if isinstance(item, ChoiceDelta):
                self._observe_delta(item, now)
            elif isinstance(item, ChoiceFinished):
                self._num_unfinished -= 1
                self._num_tokens[item.choice] = item.num_output_tokens
                self._metrics.finished[_FINISHED_REASONS[item.reason]].inc()

    def close(self, finished_reason: str, now: float) -> None:
        """The request is over; `finished_reason` goes for the choices that had no end of their own."""
        self._metrics.finished[finished_reason].inc(self._num_unfinished)
        self._metrics.choices.observe(len(self._num_tokens))
        self._metrics.prompt_tokens.observe(self._num_prompt_tokens)
        self._metrics.generation_tokens.observe(sum(self._num_tokens))
        self._metrics.max_generation_tokens.observe(max(self._num_tokens))
        self._metrics.duration.observe(now - self._arrival)

    def _observe_delta(self, delta: ChoiceDelta, now: float) -> None:
        last = self._last_token[delta.choice]
        if not self._has_tokens:
            self._has_tokens = True
            self._metrics.time_to_first_token.observe(now - self._arrival)
        if last is not None:
            self._metrics.inter_token_latency.observe(now - last)
        self._last_token[delta.choice] = now
        self._num_tokens[delta.choice] += delta.num_tokens
