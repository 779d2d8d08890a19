"""EngineCoreProc: the busy loop around EngineCore, its input queue, and orderly shutdown.

The thread that calls `run_busy_loop` owns the scheduler, the KV cache and the executor. Every other thread only puts
messages on `input_queue` (and eager aborts on `aborts_queue`) or reads the snapshots published here.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from engine_core.core import EngineCore
from engine_core.kv_event_feed import KVEventFeed
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.messages import (
    Abort,
    Add,
    ExecutorFailure,
    InputMessage,
    PingStepLoop,
    Pong,
    ShutdownNotice,
    UtilityCall,
    WakeUp,
)
from engine_core.model_executor.executor import ExecutorFailedError
from engine_core.output_queue import OutputQueue
from engine_core.reason_counter import ReasonCounter
from engine_core.scheduler.output import EngineCoreOutput, EngineCoreOutputs, Finish, FinishReason, SchedulerStats
from engine_core.scheduler.request import Request, RequestKey
from engine_core.scheduler.request_error import RequestError
from engine_core.step_progress import StepProgress
from engine_core.utilities import DrainRequest, Utilities
from stepwire.errors import InvariantViolation

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Frontends balance on these numbers; more often would cost frames, less often would herd requests.
STATS_INTERVAL_S = 0.1
# Labels of the rejected counter that exist from the start.
REJECT_REASONS = ("QUEUE_FULL", "KV_CAPACITY", "DRAINING", "FIELD_INVALID", "UNSUPPORTED_FEATURE")
# Integrity check and garbage collection walk everything; not after every short burst of requests.
HOUSEKEEPING_INTERVAL_S = 10.0
# A deadline may lie farther away than a wait can last.
MAX_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class ShutdownRequest:
    """Drain until `deadline`, then abort what is left."""

    deadline: float
    reason: str


class EngineCoreProc:
    """Queues and loop of one engine core."""

    def __init__(
        self,
        core: EngineCore,
        output_queue: OutputQueue,
        lifecycle: EngineLifecycle,
        progress: StepProgress,
        clock: Callable[[], float],
        *,
        profile_dir: Path | None = None,
        drain: DrainRequest | None = None,
        kv_event_feed: KVEventFeed | None = None,
    ) -> None:
        self.core = core
        self.output_queue = output_queue
        self.lifecycle = lifecycle
        self.progress = progress
        # SimpleQueue: re-entrant put in C, and a get that blocks without polling.
        self.input_queue: queue.SimpleQueue[InputMessage] = queue.SimpleQueue()
        self.aborts_queue = core.aborts_queue
        if core.structured_output is not None:
            core.structured_output.wake_up = self._wake_up
        # None = changes of the prefix cache are not even noted.
        self.kv_event_feed = kv_event_feed
        if kv_event_feed is not None:
            core.scheduler.kv_cache_manager.pool.collect_events()
        # Replaced, never changed in place: any thread may read it.
        self.latest_stats = SchedulerStats(num_total_blocks=core.scheduler.kv_cache_manager.pool.num_total)
        self.num_rejected = ReasonCounter(REJECT_REASONS)
        # Requests that failed before the scheduler knew them; it counts its own.
        self.num_unreadable = ReasonCounter(("REQUEST_FAILED",))
        # `drain` starts a shutdown on behalf of a utility call; the process counts it with the signals.
        self.utilities = Utilities(
            core,
            lifecycle,
            self.input_queue,
            output_queue,
            drain=drain or self._drain_at_once,
            republish_stats=self.republish_stats,
            profile_dir=profile_dir,
        )
        self._clock = clock
        self._shutdown: ShutdownRequest | None = None
        self._shutdown_lock = threading.Lock()
        self._stats_time = float("-inf")
        self._housekeeping_time = clock()
        self._is_draining = False
        # False: the model sleeps, so that what is in the engine can only be aborted.
        self._can_finish = True
        lifecycle.listen(self._tell_state)

    # -- any thread --------------------------------------------------------------------------------------------------

    def abort(self, keys: list[RequestKey], reason: str) -> None:
        """End requests: in order with their adds, and eagerly, so that an abort beats the step that is running."""
        abort = Abort(keys, reason)
        self.input_queue.put(abort)
        self.aborts_queue.put(abort)

    def request_shutdown(self, drain_timeout_s: float, reason: str) -> None:
        """Drain and leave the loop. Called again, it can only shorten the drain. Never from a signal handler.

        Health and the frontends hear of it here and not from the loop, which may be in a long step.
        """
        with self._shutdown_lock:
            deadline = self._clock() + drain_timeout_s
            if self._shutdown is None or deadline < self._shutdown.deadline:
                self._shutdown = ShutdownRequest(deadline, reason)
        if self.lifecycle.move_to(EngineState.DRAINING):
            logger.info("draining for up to %.1f s: %s", drain_timeout_s, reason)
            self.output_queue.put_all(ShutdownNotice(drain_timeout_s, reason))
        self.input_queue.put(WakeUp())

    @property
    def shutdown_deadline(self) -> float | None:
        """When the drain time is over; None while nobody wants the engine to end."""
        return None if self._shutdown is None else self._shutdown.deadline

    def expire_grammars(self) -> None:
        """Fail the requests whose grammar takes too long to compile; for the monitor."""
        if self.core.structured_output is not None:
            self.core.structured_output.expire()

    def republish_stats(self) -> None:
        """Send the newest snapshot again; for the monitor, while the loop has nothing new to say."""
        self.output_queue.put_all(self.stats_message())

    def stats_message(self) -> EngineCoreOutputs:
        stats = replace(self.latest_stats, weight_version=self.core.config.served_model.weight_version)
        return EngineCoreOutputs(self.core.num_steps, self._clock(), stats=stats)

    def _drain_at_once(self, timeout_s: float | None, reason: str) -> None:
        self.request_shutdown(timeout_s or 0.0, reason)

    def _tell_state(self, state: EngineState) -> None:
        """Frontends route by the state: they hear of a pause now and not with the next statistics."""
        if state in (EngineState.RUNNING, EngineState.PAUSED, EngineState.SLEEPING):
            self.republish_stats()

    def executor_failed(self, error: BaseException) -> None:
        """Failure callback of the executor: the loop raises it, and the engine dies with this cause."""
        self.input_queue.put(ExecutorFailure(error))

    # -- the busy loop -----------------------------------------------------------------------------------------------

    def run_busy_loop(self) -> None:
        """Serve until a shutdown has drained. Whatever leaves it as an exception is the engine's death."""
        while True:
            self._process_input_queue()
            if self._shutdown is not None and self._drain(self._shutdown):
                return
            if self.core.has_work and not self.core.is_blocked:
                self._process_step()

    def _process_input_queue(self) -> None:
        """Block only when there is nothing else to do; then take everything that is queued."""
        outputs: list[EngineCoreOutput] = []
        if not self.core.has_work and self._shutdown is None:
            self._on_idle()
            outputs += self._wait_for_message()
        elif self.core.is_blocked:
            outputs += self._wait_blocked()
        while not self.input_queue.empty():
            outputs += self._handle(self.input_queue.get())
        self._emit(outputs)
        self.utilities.expire()

    def _wait_for_message(self) -> list[EngineCoreOutput]:
        """Until there is a message, or until a pause has outlasted the time of a request or of a call."""
        deadlines = (self.core.scheduler.next_deadline, self.utilities.next_deadline)
        next_deadline = min((deadline for deadline in deadlines if deadline is not None), default=None)
        timeout_s = None if next_deadline is None else min(max(0.0, next_deadline - self._clock()), MAX_WAIT_S)
        try:
            return self._handle(self.input_queue.get(timeout=timeout_s))
        except queue.Empty:
            self.core.expire_requests()
            return []

    def _wait_blocked(self) -> list[EngineCoreOutput]:
        """All requests wait for grammars: one that is done wakes the loop up, or a deadline does."""
        self._publish_stats(is_idle=True)
        deadlines = (self.core.scheduler.next_deadline, self.shutdown_deadline)
        waits = [deadline - self._clock() for deadline in deadlines if deadline is not None]
        try:
            message = self.input_queue.get(timeout=max(0.0, min([*waits, MAX_WAIT_S])))
        except queue.Empty:
            return []
        return self._handle(message)

    def _wake_up(self) -> None:
        self.input_queue.put(WakeUp())

    def _on_idle(self) -> None:
        # A grammar that failed during a pause.
        self._emit(self.core.take_grammars())
        self._watched(self.utilities.on_idle)
        self._publish_kv_events()
        self._publish_stats(is_idle=True)
        if self.input_queue.empty():
            # All of them were seen in order by now; what is left would hit nothing.
            self.core.clear_aborts()
        is_quiet = self.input_queue.empty()
        if is_quiet and self._clock() - self._housekeeping_time >= HOUSEKEEPING_INTERVAL_S:
            self._housekeeping_time = self._clock()
            violations = self.core.scheduler.check_integrity()
            if violations:
                raise InvariantViolation("; ".join(violations))
            gc.collect()

    def _handle(self, message: InputMessage) -> list[EngineCoreOutput]:
        match message:
            case Add(requests):
                added = [self._add(request) for request in requests]
                return [output for output in added if output is not None]
            case Abort(keys, reason):
                return self.core.abort_requests(keys, reason)
            case UtilityCall():
                return self._run_utility(message)
            case PingStepLoop(session_id, nonce, client_monotonic_ns):
                self.output_queue.put(session_id, Pong(nonce, True, client_monotonic_ns))
            case ExecutorFailure(error):
                raise ExecutorFailedError(str(error)) from error
            case WakeUp():
                pass
        return []

    def _run_utility(self, call: UtilityCall) -> list[EngineCoreOutput]:
        outputs = self._watched(lambda: self.utilities.handle(call))
        self._publish_kv_events()
        return outputs

    def _watched(self, work: Callable[[], T]) -> T:
        """As a step: the watchdog must see what hangs."""
        self.progress.begin()
        result = work()
        self.progress.end(self.core.num_steps, None)
        return result

    def _add(self, request: Request) -> EngineCoreOutput | None:
        if self._shutdown is None:
            output = self.core.add_request(request)
        else:
            # Never "aborted": the frontend may send a request that was refused to another engine.
            error = RequestError("DRAINING", "the engine is shutting down", retryable=True, retry_after_ms=1000)
            output = EngineCoreOutput(request.key, finish=Finish(FinishReason.REJECTED, error=error))
        finish = None if output is None else output.finish
        if finish is not None and finish.error is not None and finish.reason is FinishReason.REJECTED:
            self.num_rejected.add(finish.error.reason)
        return output

    def _process_step(self) -> None:
        self.progress.begin()
        outputs, has_model_run = self.core.step()
        self.progress.end(self.core.num_steps, self.core.last_step_tokens if has_model_run else None)
        ended = self._clock()
        self._emit(outputs)
        if has_model_run:
            self.core.times.output.observe(self._clock() - ended)
        self._watched(self.utilities.on_step)
        self._publish_kv_events()
        self._publish_stats()

    def _drain(self, shutdown: ShutdownRequest) -> bool:
        """One look at a shutdown in progress; True when nothing is left to do."""
        if not self._is_draining:
            self._is_draining = True
            self._can_finish = self.utilities.begin_drain()
        if self._clock() >= shutdown.deadline or not self._can_finish:
            self._emit(self.core.abort_requests(None, "shutdown"))
        # A step that hangs must be seen by the monitor, not by the clean-up.
        return not (self.core.scheduler.requests or self.core.num_steps_in_flight)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _emit(self, outputs: list[EngineCoreOutput]) -> None:
        """One batch for each session that has news."""
        if not outputs:
            return
        by_session: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)
        for output in outputs:
            by_session[output.key[0]].append(output)
        now = self._clock()
        for session_id, session_outputs in by_session.items():
            self.output_queue.put(session_id, EngineCoreOutputs(self.core.num_steps, now, session_outputs))

    def _publish_kv_events(self) -> None:
        if self.kv_event_feed is not None:
            self.kv_event_feed.publish(self.core.scheduler.kv_cache_manager.pool.take_events())

    def _publish_stats(self, *, is_idle: bool = False) -> None:
        now = self._clock()
        if not is_idle and now - self._stats_time < STATS_INTERVAL_S:
            return
        stats = self.core.scheduler.stats()
        if stats != self.latest_stats:
            self._stats_time = now
            self.latest_stats = stats
            self.output_queue.put_all(self.stats_message())
