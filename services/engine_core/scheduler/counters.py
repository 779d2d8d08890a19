"""What the scheduler has counted since the engine's start. Plain integers: text is made by whoever scrapes."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field

from engine_core.kv_cache.block_pool import BlockPool
from engine_core.scheduler.output import PrefillStats, SchedulerStats
from engine_core.scheduler.request import EventType, Request
from engine_core.scheduler.request_error import RequestError
from engine_core.scheduler.request_queue import RequestQueue
from engine_core.scheduler.request_times import RequestTimes


@dataclass(slots=True)
class SchedulerCounters:
    """Only ever grow, so that a lost snapshot loses nothing."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preempted_query_tokens: int = 0
    preempted_hit_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    # Of these: found in the prefix cache.
    num_cached_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    # Requests for which the model has computed NaN.
    num_corrupted: int = 0
    # Requests that failed, by reason.
    errors: dict[str, int] = field(default_factory=dict)
    times: RequestTimes = field(default_factory=RequestTimes)

    def count_prefix_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """First look-ups and repeats after a preemption are counted apart: the latter flatter the hit rate.

        A request that may not read the cache looks nothing up.
        """
        if request.bypass_prefix_cache or request.needs_whole_prompt:
            return
        if request.num_preemptions:
            self.preempted_query_tokens += request.num_tokens
            self.preempted_hit_tokens += num_hit_tokens
        else:
            self.prefix_query_tokens += request.num_tokens
            self.prefix_hit_tokens += num_hit_tokens

    def count_prefill(self, request: Request) -> PrefillStats:
        """A prompt is complete."""
        prefill = PrefillStats.of(request)
        self.num_prompt_tokens += prefill.num_prompt_tokens
        self.num_cached_prompt_tokens += prefill.num_cached_tokens
        return prefill

    def note_first_token(self, request: Request, now: float, step: int) -> PrefillStats:
        """The prompt of a request is computed, and has brought a token."""
        request.first_token_time = now
        request.note_event(EventType.FIRST_TOKEN, now, step)
        return self.count_prefill(request)

    def note_corrupted(self, request: Request) -> bool:
        """The model has computed NaN for it; returns whether that is the first time."""
        if request.is_corrupted:
            return False
        request.is_corrupted = True
        self.num_corrupted += 1
        return True

    def note_end(self, request: Request, error: RequestError | None) -> None:
        """A request is over, in whatever way."""
        self.times.note_end(request)
        if error is not None:
            self.errors[error.reason] = self.errors.get(error.reason, 0) + 1

    def snapshot(
        self, running: Sized, waiting: RequestQueue, skipped_waiting: RequestQueue, pool: BlockPool
    ) -> SchedulerStats:
        """The counters, and what queues and pool hold now."""
        arrivals = (queue.oldest_arrival for queue in (waiting, skipped_waiting))
        return SchedulerStats(
            num_running=len(running),
            num_waiting=len(waiting) + len(skipped_waiting),
            num_waiting_deferred=len(skipped_waiting),
            num_waiting_tokens=waiting.num_uncached_tokens + skipped_waiting.num_uncached_tokens,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_total_blocks=pool.num_total,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            preempted_query_tokens=self.preempted_query_tokens,
            preempted_hit_tokens=self.preempted_hit_tokens,
            num_preemptions=self.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_prompt_tokens=self.num_cached_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_corrupted=self.num_corrupted,
            num_evictions=pool.num_evictions,
            num_collisions=pool.num_collisions,
            oldest_waiting_time=min((time for time in arrivals if time is not None), default=None),
        )
