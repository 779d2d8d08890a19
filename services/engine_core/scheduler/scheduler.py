"""The scheduler: which tokens of which requests are computed in the next step.

One rule covers prefill, chunks and decode: a request's computed tokens chase its known tokens, and a step hands out at
most `max_num_batched_tokens` of them. Pure and deterministic: time is an argument, and the same calls give the same
result. Owner: the busy-loop thread.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.kv_cache_manager import BlockIds, KVCacheManager
from engine_core.kv_cache.prefix_lookup import PrefixHit
from engine_core.scheduler.admission import admission_error, queued_event
from engine_core.scheduler.counters import SchedulerCounters
from engine_core.scheduler.deadlines import Deadlines
from engine_core.scheduler.integrity import broken_invariants
from engine_core.scheduler.logprobs import attach_token_rows, new_prompt_rows
from engine_core.scheduler.output import (
    FINISH_REASONS,
    GRAMMAR_VIOLATION,
    EngineCoreOutput,
    Finish,
    FinishReason,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SchedulerStats,
)
from engine_core.scheduler.pause_state import PauseState
from engine_core.scheduler.request import EventType, Request, RequestKey, RequestStatus
from engine_core.scheduler.request_blocks import RequestBlocks
from engine_core.scheduler.request_error import RequestError
from engine_core.scheduler.request_queue import RequestQueue
from engine_core.scheduler.scheduler_config import SchedulerConfig
from engine_core.scheduler.step_plan import StepPlan
from engine_core.scheduler.stop_check import append_tokens
from engine_core.scheduler.waiting_queue import WaitingQueue
from stepwire.errors import InvariantViolation


class Scheduler:
    """Requests in, steps out, tokens back in, outputs out."""

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, block_hasher: BlockHasher) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[RequestKey, Request] = {}
        self.waiting = WaitingQueue(config.scheduling_policy, config.client_classes, config.max_num_seqs)
        # Were next in `waiting` before their grammar was compiled; they hold up nobody.
        self.skipped_waiting = RequestQueue()
        # In the order of the policy: the last one is preempted first.
        self.running: list[Request] = []
        self.pause_state = PauseState.NONE
        self._blocks = RequestBlocks(kv_cache_manager, block_hasher, config)
        # Ended requests the workers still hold state for; emptied by the next schedule().
        self._finished_keys: list[RequestKey] = []
        # Ends by deadline; emptied by take_expired_outputs().
        self._expired_outputs: list[EngineCoreOutput] = []
        self._deadlines = Deadlines()
        self.counters = SchedulerCounters()
        # The newest step that was planned, and the newest whose results are in; what lies between is in flight.
        self._planned_step = 0
        self._processed_step = 0

    # -- requests in -------------------------------------------------------------------------------------------------

    def add_request(self, request: Request, now: float) -> EngineCoreOutput:
        """Queue a request. The output says QUEUED, or REJECTED with the reason: it was never scheduled."""
        error = admission_error(request, (self.waiting, self.skipped_waiting), self.kv_cache_manager, self.config)
        if error is not None:
            request.set_status(RequestStatus.FINISHED_REJECTED)
            return EngineCoreOutput(request.key, finish=Finish(FinishReason.REJECTED, error=error))
        self._blocks.enter(request)
        request.queued_time = now
        queued = queued_event((self.waiting, self.skipped_waiting), now)
        self.requests[request.key] = request
        self.waiting.append(request)
        self._deadlines.push(request)
        self._deadlines.forget_ended(self.requests)
        return EngineCoreOutput(request.key, events=[queued])

    def finish_requests(self, keys: Iterable[RequestKey] | None, status: RequestStatus) -> list[EngineCoreOutput]:
        """End requests from outside, at once. None = all; unknown and ended keys are ignored."""
        targets = list(self.requests if keys is None else keys)
        return [self._finish(self.requests[key], status) for key in targets if key in self.requests]

    def grammar_done(self, key: RequestKey) -> list[EngineCoreOutput]:
        """A grammar is ready or has failed. Its request may not be known, or not any more."""
        request = self.requests.get(key)
        if request is None or request.grammar is None:
            return []
        if request.grammar.error is not None:
            return [self._finish(request, RequestStatus.FINISHED_ERROR, error=request.grammar.error)]
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self.skipped_waiting.remove(request)
            request.set_status(RequestStatus.WAITING)
            self.waiting.put_back(request)
        return []

    # -- steps out ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Requests to serve, or ends the workers have not been told of (they would keep that state for ever)."""
        return bool(self._finished_keys) or bool(self._expired_outputs) or self._can_advance

    def is_blocked(self, now: float) -> bool:
        """All requests wait for their grammars: a step could do nothing before one is done or a deadline passes."""
        all_wait = bool(self.requests) and len(self.skipped_waiting) == len(self.requests)
        has_news = self._finished_keys or self._expired_outputs
        return all_wait and not has_news and (self.next_deadline is None or self.next_deadline > now)

    @property
    def next_deadline(self) -> float | None:
        """When the next deadline passes; None = there is none."""
        return self._deadlines.next_time

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan one step: expire, then running requests in order, then waiting ones. May plan nothing."""
        self.expire(now)
        token_budget = 0 if self.pause_state is PauseState.ALL else self.config.max_num_batched_tokens
        decodes, waiting = sum(request.is_decoding for request in self.running), self.waiting
        prefill_budget = self.config.prefill_budget(decodes, len(self.running) + len(waiting), waiting.num_tokens)
        plan = StepPlan(self.config, self._planned_step + 1, token_budget, prefill_budget)
        self._schedule_running(plan, now)
        if not plan.is_short_of_blocks:
            self._admit_waiting(plan, now)
        return self._emit(plan)

    @property
    def _can_advance(self) -> bool:
        """Whether any request may get tokens, as far as the pause goes."""
        if self.pause_state is not PauseState.NEW:
            return self.pause_state is PauseState.NONE and bool(self.requests)
        return bool(self.running) or self.waiting.has_preempted

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed; also called while a pause keeps steps away."""
        for request, error in self._deadlines.pop_expired(now, self.requests):
            self._expired_outputs.append(self._finish(request, RequestStatus.FINISHED_ERROR, error=error))

    def _schedule_running(self, plan: StepPlan, now: float) -> None:
        index = 0
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            num_new_tokens = plan.num_new_tokens(request, request.num_computed_tokens)
            index += 1
            if num_new_tokens == 0:
                continue
            block_ids = self._allocate_or_preempt(request, request.num_computed_tokens + num_new_tokens, plan, now)
            if block_ids is None:
                return
            plan.add_running(request.key, block_ids, request.num_computed_tokens, num_new_tokens)
            self._mark_computed(request, num_new_tokens, plan)

    def _allocate_or_preempt(self, request: Request, num_tokens: int, plan: StepPlan, now: float) -> BlockIds | None:
        """Blocks for `num_tokens`, preempting from the back of `running`; None ends the planning of running requests.

        The request itself had to go, or steps in flight still use what would have to be taken: a later step gets it.
        """
        while True:
            block_ids = self._blocks.extend(request, num_tokens)
            if block_ids is not None:
                return block_ids
            plan.is_short_of_blocks = True
            must_wait = self._is_in_flight(self.running[-1]) or self._has_fences_to_wait_for(request)
            if must_wait or self._preempt_last(now, plan.step) is request:
                return None

    def _is_in_flight(self, request: Request) -> bool:
        return request.last_step > self._processed_step

    def _has_fences_to_wait_for(self, request: Request) -> bool:
        """Blocks come back by themselves. For ever new ones, as windows make them, a request does not wait."""
        return request.last_step >= self._processed_step and self.kv_cache_manager.num_fenced_blocks > 0

    def _preempt_last(self, now: float, step: int) -> Request:
        """Recompute later: blocks are freed, outputs are kept, and the request waits before those that never ran."""
        request = self.running.pop()
        if self._is_in_flight(request):
            raise InvariantViolation(f"request {request.key} was to be preempted during its step {request.last_step}")
        self._blocks.free(request)
        request.set_status(RequestStatus.PREEMPTED)
        request.note_preempted(now, step)
        self.counters.num_preemptions += 1
        self.waiting.put_back(request)
        return request

    def preempt_all(self, now: float) -> None:
        """Take the blocks of every running request; they are recomputed in the order they ran. No step is in flight."""
        while self.running:
            self._preempt_last(now, self._planned_step)

    def _admit_waiting(self, plan: StepPlan, now: float) -> None:
        while plan.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            # A pause lets what has begun go on to its end, preempted or not, and begins nothing.
            request = self.waiting.peek(self.running, now, only_preempted=self.pause_state is PauseState.NEW)
            if request is None:
                return
            if request.grammar is not None and not request.grammar.is_ready:
                self._set_aside(request)
                continue
            hit = self._blocks.computed(request)
            num_new_tokens = plan.num_new_tokens(request, hit.num_tokens)
            is_whole = hit.num_tokens + num_new_tokens == request.num_tokens
            is_allowed = is_whole or self.config.allows_partial_prefill(plan.num_partial_prefills)
            fits = self._blocks.fits_now(request, hit, num_new_tokens, next_to_others=bool(self.running))
            # Head of line: whoever does not fit ends admission, so that long prompts are not overtaken for ever.
            if not (num_new_tokens and is_allowed and fits):
                return
            self._admit(request, hit, num_new_tokens, plan, now)

    def _set_aside(self, request: Request) -> None:
        self.waiting.remove(request)
        request.set_status(RequestStatus.WAITING_FOR_GRAMMAR)
        self.skipped_waiting.append(request)

    def _admit(self, request: Request, hit: PrefixHit, num_new_tokens: int, plan: StepPlan, now: float) -> None:
        request.num_computed_tokens = num_computed_tokens = hit.num_tokens
        self.kv_cache_manager.allocate_slots(request.key, num_computed_tokens + num_new_tokens, hit)
        block_ids = self.kv_cache_manager.block_ids(request.key)
        self.waiting.take(request)
        insort(self.running, request, key=self.config.scheduling_policy.order)
        if self.kv_cache_manager.pool.enable_caching:
            self.counters.count_prefix_lookup(request, num_computed_tokens)
        if request.was_scheduled:
            num_lost = max(0, request.num_lost_tokens - num_computed_tokens)
            request.note_event(EventType.RESUMED, now, plan.step, computed_tokens_lost=num_lost)
            plan.add_resumed(request.key, block_ids, num_computed_tokens, num_new_tokens)
        else:
            # A resumed generation may hit blocks of its own output as well.
            request.num_cached_tokens = min(num_computed_tokens, request.num_prompt_tokens)
            request.scheduled_time = now
            facts = {"cached_tokens": num_computed_tokens, "blocks": self.kv_cache_manager.num_blocks(request.key)}
            request.note_event(EventType.SCHEDULED, now, plan.step, **facts)
            plan.add_new(NewRequestData.of(request, block_ids), num_new_tokens)
        request.set_status(RequestStatus.RUNNING)
        self._mark_computed(request, num_new_tokens, plan)

    def _mark_computed(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        """The step just planned computes these tokens. Later steps, and hits on full blocks, build on it."""
        request.num_computed_tokens += num_new_tokens
        request.first_step, request.last_step = request.first_step or plan.step, plan.step
        num_missing = request.num_tokens - request.num_computed_tokens
        if num_new_tokens > 1 or num_missing > 0:  # One token of a longer prompt is no decode.
            plan.prefill_budget -= num_new_tokens
            plan.num_partial_prefills += num_missing > 0
        if num_missing + request.num_in_flight_tokens == 0:
            request.num_in_flight_tokens += 1
            if request.grammar is not None:
                plan.grammar_keys.append(request.key)
        self._blocks.register(request)

    def _emit(self, plan: StepPlan) -> SchedulerOutput:
        finished_keys, self._finished_keys = self._finished_keys, []
        scheduler_output = plan.finish(finished_keys)
        if not scheduler_output.is_empty:
            self._planned_step = plan.step
        return scheduler_output

    def take_expired_outputs(self) -> list[EngineCoreOutput]:
        """The ends by deadline that nobody was told of."""
        outputs, self._expired_outputs = self._expired_outputs, []
        return outputs

    # -- tokens back in, outputs out ---------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput, now: float
    ) -> list[EngineCoreOutput]:
        """Take in the tokens of the oldest step in flight. Requests that ended since it was planned are skipped."""
        self._processed_step = scheduler_output.step
        self.kv_cache_manager.release_fenced(scheduler_output.step)
        outputs: list[EngineCoreOutput] = []
        pooled = runner_output.pooled
        for key, token_ids in zip(runner_output.keys, runner_output.sampled_token_ids, strict=True):
            request = self.requests.get(key)
            # The latter: a broken frontend used the handle again, and this is the result of its predecessor.
            if request is None or not request.was_in(scheduler_output.step):
                continue
            if pooled and key in pooled:
                outputs.append(self._finish_pooled(request, pooled[key]))
                continue
            prompt_rows = new_prompt_rows(request, runner_output.prompt_logprobs.get(key))
            # A partial prefill samples nothing, and has no news but those of its prompt.
            if not token_ids and prompt_rows is None:
                continue
            output = self._update_request(request, token_ids, now) if token_ids else EngineCoreOutput(key)
            output.prompt_logprobs = prompt_rows
            attach_token_rows(output, runner_output)
            outputs.append(output)
        return outputs

    def _update_request(self, request: Request, token_ids: list[int], now: float) -> EngineCoreOutput:
        request.num_in_flight_tokens -= 1
        request.last_token_time = now
        output = EngineCoreOutput(request.key)
        if len(request.output_token_ids) == request.num_resumed_tokens:
            output.prefill = self.counters.note_first_token(request, now, self._processed_step)
        output.new_token_ids, status = append_tokens(request, token_ids, self.config.max_model_len)
        self.counters.num_generation_tokens += len(output.new_token_ids)
        if status is not None:
            error = GRAMMAR_VIOLATION if status is RequestStatus.FINISHED_ERROR else None
            return self._finish(request, status, output, error)
        self._blocks.extend_hashes(request)
        output.events, request.events = request.events, []
        return output

    def _finish_pooled(self, request: Request, pooled: bytes) -> EngineCoreOutput:
        output = EngineCoreOutput(request.key, prefill=self.counters.count_prefill(request), pooled=pooled)
        return self._finish(request, RequestStatus.FINISHED_STOPPED, output)

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        output: EngineCoreOutput | None = None,
        error: RequestError | None = None,
    ) -> EngineCoreOutput:
        """The one way out for a request that was added: leave the queues, free the blocks, tell the workers later."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self.skipped_waiting.remove(request)
        else:
            self.waiting.remove(request)
        request.set_status(status)
        self.counters.note_end(request, error)
        self._blocks.free(request)
        del self.requests[request.key]
        if request.was_scheduled:
            self._finished_keys.append(request.key)
        output = output or EngineCoreOutput(request.key)
        output.events, request.events = request.events, []
        output.finish = Finish(FINISH_REASONS[status], request.stop_token_id, error, request.num_preemptions)
        return output

    # -- looking in --------------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Snapshot for metrics and for the balancers of the frontends."""
        return self.counters.snapshot(self.running, self.waiting, self.skipped_waiting, self.kv_cache_manager.pool)

    def check_integrity(self) -> list[str]:
        """Broken invariants in words; empty = sound. For idle moments, tests and DumpState."""
        queues = (self.waiting, self.skipped_waiting)
        return broken_invariants(self.requests, queues, self.running, self.kv_cache_manager)
