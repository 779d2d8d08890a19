"""How long requests waited, were prefilled and decoded, noted when they end. Pure; written by the busy-loop thread.

An interval counts when both of its ends were reached: a request that ends in the queue has no prefill.
"""

from __future__ import annotations

from engine_core.scheduler.request import Request
from stepwire.histogram import Histogram

# Seconds. The same as for whole requests in the frontend.
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKEN_BUCKETS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)
PREEMPTION_BUCKETS = (0, 1, 2, 5, 10)


class RequestTimes:
    """Histograms over all requests since the start. Times are those of the scheduler's clock."""

    def __init__(self) -> None:
        self.queue = Histogram(LATENCY_BUCKETS)
        self.prefill = Histogram(LATENCY_BUCKETS)
        self.decode = Histogram(LATENCY_BUCKETS)
        self.inference = Histogram(LATENCY_BUCKETS)
        self.computed_tokens = Histogram(TOKEN_BUCKETS)
        self.preemptions = Histogram(PREEMPTION_BUCKETS)

    def note_end(self, request: Request) -> None:
        """The request is over, in whatever way."""
        self.preemptions.observe(request.num_preemptions)
        if not request.was_scheduled:
            return
        self.queue.observe(request.scheduled_time - request.queued_time)
        if request.first_token_time is None:
            return
        self.prefill.observe(request.first_token_time - request.scheduled_time)
        self.decode.observe(request.last_token_time - request.first_token_time)
        self.inference.observe(request.last_token_time - request.scheduled_time)
        self.computed_tokens.observe(request.num_prompt_tokens - (request.num_cached_tokens or 0))
