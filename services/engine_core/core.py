"""EngineCore: the body of the step loop. No threads, no sockets, no tokenizer, no clock of its own.

Constructed with an executor and a resolved configuration, and stepped by its owner: EngineCoreProc in a service.
"""

from __future__ import annotations

import logging
import queue
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.messages import ABORT_REASONS, Abort
from engine_core.model_executor.executor import Executor
from engine_core.protocol_check import protocol_error
from engine_core.reason_counter import ReasonCounter
from engine_core.resolved_config import ResolvedConfig
from engine_core.scheduler.output import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.request import Request, RequestKey, RequestStatus
from engine_core.scheduler.request_error import RequestError
from engine_core.scheduler.scheduler import Scheduler
from engine_core.step_costs import StepCosts
from engine_core.step_times import StepListener, StepStamps, StepTimes
from engine_core.structured_output.bitmask import GrammarBitmask
from stepwire.errors import InvariantViolation
from stepwire.shared_histogram import SharedHistogram

if TYPE_CHECKING:
    from engine_core.structured_output.manager import StructuredOutputManager

logger = logging.getLogger(__name__)


class StepError(Exception):
    """A step failed and the engine can not go on. `report_id` finds the dump in the log."""

    def __init__(self, cause: BaseException, report_id: str) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.report_id = report_id


@dataclass(frozen=True, slots=True)
class _Batch:
    """A step in flight."""

    scheduler_output: SchedulerOutput
    runner_output: Future[ModelRunnerOutput]
    stamps: StepStamps


class EngineCore:
    """One step: schedule, start the forward pass, sample, take aborts in, update.

    With an executor of several concurrent batches the next step is planned and started before the last one is taken in.
    """

    def __init__(
        self,
        executor: Executor,
        config: ResolvedConfig,
        clock: Callable[[], float],
        structured_output: StructuredOutputManager | None = None,
    ) -> None:
        self.executor = executor
        self.config = config
        self.clock = clock
        # None: the bytes of this model's tokens are not known.
        self.structured_output = structured_output
        self.block_hasher = BlockHasher(config.block_size, config.seed_of_hashes)
        self.scheduler = Scheduler(
            config.scheduler_config(),
            KVCacheManager(
                config.num_blocks,
                config.kv_cache_layout,
                enable_caching=config.enable_prefix_caching,
                verify_hits=config.verify_prefix_hits,
            ),
            self.block_hasher,
        )
        # Aborts again, next to the input queue: read in every step, so that they win over a finish in that step.
        self.aborts_queue: queue.SimpleQueue[Abort] = queue.SimpleQueue()
        # Steps in flight, oldest first.
        self._batches: deque[_Batch] = deque()
        self.num_steps = 0
        self.last_step_tokens = 0
        self.times = StepTimes(config.max_num_seqs, config.max_num_batched_tokens)
        # None = nobody wants to know.
        self.step_costs: StepCosts | None = None
        self.num_aborted = ReasonCounter(ABORT_REASONS)
        # Told of every step that was taken in, before anybody hears of its results.
        self.on_step: StepListener | None = None
        # Of input threads.
        self.hash_times = SharedHistogram()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._batches)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._batches)

    @property
    def is_blocked(self) -> bool:
        """There is work, and a step could do none of it: all of it waits for grammars."""
        return not (self._batches or self._has_grammars_done) and self.scheduler.is_blocked(self.clock())

    @property
    def _has_grammars_done(self) -> bool:
        return self.structured_output is not None and self.structured_output.has_done

    def preprocess_add_request(self, request: Request) -> RequestError | None:
        """The part of an add that needs no scheduler state; runs in the input thread, beside the forward pass.

        Hashing costs 100-200 ns a token, too much for the loop. An error refuses the request: a frontend that sent
        it broke the protocol, and an id outside the vocabulary would kill the engine for everybody.
        """
        error = protocol_error(request, self.config)
        if error is None:
            self._start_grammar(request)
            if request.pooling is not None and self.config.pooling is not None:
                request.pooling = request.pooling.completed(self.config.pooling)
        if error is None and self.config.enable_prefix_caching:
            began = self.clock()
            self.block_hasher.extend(request.block_hashes, request.num_tokens, request.token_ids, request.cache_salt)
            self.hash_times.observe(self.clock() - began)
        return error

    def _start_grammar(self, request: Request) -> None:
        if request.grammar_spec is not None and self.structured_output is not None:
            self.structured_output.start(request, request.grammar_spec)

    def add_request(self, request: Request) -> EngineCoreOutput | None:
        """Queue a request; None when its handle is known already (it was sent again after a broken stream)."""
        if request.key in self.scheduler.requests:
            return None
        output = self.scheduler.add_request(request, self.clock())
        # It may have failed before the scheduler knew of the request.
        if output.finish is None and request.grammar is not None and request.grammar.error is not None:
            [output] = self.scheduler.grammar_done(request.key)
        return output

    def abort_requests(self, keys: Iterable[RequestKey] | None, reason: str) -> list[EngineCoreOutput]:
        """End requests as aborted; None = all. Counts those that were still there, whichever queue brought it."""
        outputs = self.scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)
        self.num_aborted.add(reason, len(outputs))
        return outputs

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        """Forget all cached content; False, and nothing changed, while blocks are in use. No step is in flight.

        With `reset_running_requests` all are preempted first, and then it always succeeds.
        """
        if reset_running_requests:
            self.scheduler.preempt_all(self.clock())
        is_reset = self.scheduler.kv_cache_manager.pool.reset_prefix_cache()
        if reset_running_requests and not is_reset:
            raise InvariantViolation("blocks are in use, but every request was preempted")
        return is_reset

    def expire_requests(self) -> None:
        """End requests whose time has come; for an owner that makes no steps because of a pause."""
        self.scheduler.expire(self.clock())

    def step(self) -> tuple[list[EngineCoreOutput], bool]:
        """Start a step if there is room for one, and take in the oldest one if there is none left.

        Returns the news, and whether the results of a model are among them. Raises StepError.
        """
        outputs: list[EngineCoreOutput] = []
        began, has_started = self.clock(), False
        if len(self._batches) < self.executor.max_concurrent_batches and self.scheduler.has_work:
            has_started = self._start_batch(outputs)
        has_room = len(self._batches) < self.executor.max_concurrent_batches
        # Filling goes first: what is in flight is waited for only when nothing more can be started.
        if not self._batches or (has_started and has_room and not self._batches[0].runner_output.done()):
            return outputs, False
        return outputs, self._take_in_oldest_batch(outputs, began)

    def settle(self) -> list[EngineCoreOutput]:
        """Take in all steps in flight, for what must not happen during one. Raises StepError."""
        outputs: list[EngineCoreOutput] = []
        while self._batches:
            self._take_in_oldest_batch(outputs, self.clock())
        return outputs

    def _start_batch(self, outputs: list[EngineCoreOutput]) -> bool:
        """Plan a step and hand it to the executor; False when there was nothing to plan."""
        scheduler_output = None
        try:
            now = self.clock()
            outputs += self.take_grammars()
            self.scheduler.kv_cache_manager.set_time(now)
            scheduler_output = self.scheduler.schedule(now)
            outputs += self.scheduler.take_expired_outputs()
            # Also with no tokens scheduled: the finished keys make the workers drop that state, exactly once.
            if scheduler_output.is_empty:
                return False
            if self.step_costs is not None:
                self.step_costs.count(scheduler_output.num_scheduled_tokens, self.scheduler.requests)
            planned = self.clock()
            self.executor.execute_model(scheduler_output)
            handed_over = self.clock()
            bitmask = self._fill_bitmask(scheduler_output)
            runner_output = self.executor.sample_tokens(bitmask)
            stamps = StepStamps(now, planned, handed_over, self.clock())
            self._batches.append(_Batch(scheduler_output, runner_output, stamps))
            self.times.schedule.observe(planned - now)
            self.times.sample.observe(stamps.sampled - handed_over)
        except Exception as error:
            raise self._step_error(error, scheduler_output) from error
        return True

    def _take_in_oldest_batch(self, outputs: list[EngineCoreOutput], began: float) -> bool:
        """Wait for its results; returns whether a model ran. The step counts as long as the turn that `began`."""
        batch = self._batches.popleft()
        scheduler_output = batch.scheduler_output
        waiting = self.clock()
        try:
            runner_output = batch.runner_output.result()
            done = self.clock()
            # Aborts before the update: one that arrived during the last step wins over LENGTH.
            outputs += self._drain_aborts()
            self._note_corrupted(runner_output.nan_keys, scheduler_output.step)
            outputs += self.scheduler.update_from_output(scheduler_output, runner_output, done)
        except Exception as error:
            raise self._step_error(error, scheduler_output) from error
        ended = self.clock()
        stamps = batch.stamps
        self.times.execute.observe(stamps.handed_over - stamps.planned + done - waiting)
        self.times.update.observe(ended - done)
        self.times.note_step(scheduler_output, ended - began)
        if self.on_step is not None:
            self.on_step(scheduler_output, stamps, done, ended)
        self.num_steps = scheduler_output.step
        self.last_step_tokens = scheduler_output.total_num_scheduled_tokens
        return scheduler_output.total_num_scheduled_tokens > 0

    def _note_corrupted(self, keys: Iterable[RequestKey], step: int) -> None:
        """Before the update, which ends requests; those that have ended by then are not counted."""
        for key in keys:
            request = self.scheduler.requests.get(key)
            if request is None or not request.was_in(step):
                continue
            if self.scheduler.counters.note_corrupted(request):
                logger.warning("the model computes NaN for a request: it is corrupted", extra=request.log_fields)

    def take_grammars(self) -> list[EngineCoreOutput]:
        """Let requests whose grammar is ready go on, and end those whose grammar has failed."""
        if self.structured_output is None:
            return []
        return [output for key in self.structured_output.take_done() for output in self.scheduler.grammar_done(key)]

    def _fill_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarBitmask | None:
        """Made while the forward pass runs, where the device allows."""
        if self.structured_output is None or not scheduler_output.grammar_keys:
            return None
        requests = self.scheduler.requests
        return self.structured_output.fill_bitmask(requests[key] for key in scheduler_output.grammar_keys)

    def _drain_aborts(self) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        while not self.aborts_queue.empty():
            abort = self.aborts_queue.get()
            outputs += self.abort_requests(abort.keys, abort.reason)
        return outputs

    def clear_aborts(self) -> None:
        """Forget eager aborts that the input queue has delivered in order already."""
        while not self.aborts_queue.empty():
            self.aborts_queue.get()

    def _step_error(self, error: Exception, scheduler_output: SchedulerOutput | None) -> StepError:
        """One dump for the report, built only now: counts, never token ids."""
        report_id = uuid.uuid4().hex[:12]
        logger.critical(
            "step %d failed, report %s: %s; %s; %s",
            self.num_steps + 1,
            report_id,
            "it was not scheduled" if scheduler_output is None else _describe(scheduler_output),
            self.scheduler.stats(),
            self.config,
            exc_info=error,
        )
        return StepError(error, report_id)

    def shutdown(self) -> None:
        """Release grammars and executor. Safe to call twice."""
        if self.structured_output is not None:
            self.structured_output.shutdown()
        self.executor.shutdown()


def _describe(scheduler_output: SchedulerOutput) -> str:
    return (
        f"{len(scheduler_output.num_scheduled_tokens)} requests, {len(scheduler_output.new_requests)} of them new, "
        f"{scheduler_output.total_num_scheduled_tokens} tokens, {len(scheduler_output.finished_keys)} finished"
    )
