"""Utility calls on the step loop: one handler for each operation, one answer for each call.

Owner: the busy-loop thread. A handler that completes later returns a future, which the loop itself completes: no thread
waits. A failure is the answer of that call; only what ends the engine leaves the loop.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from engine_core import operations as op
from engine_core import weight_operations as wop
from engine_core.core import EngineCore
from engine_core.lifecycle import EngineLifecycle
from engine_core.messages import InputMessage, UtilityCall, UtilityResult
from engine_core.model_executor.executor import ExecutorFailedError
from engine_core.output_queue import OutputQueue
from engine_core.pause import PauseControl
from engine_core.profile_control import ProfileControl
from engine_core.scheduler.output import EngineCoreOutput
from engine_core.scheduler.request_error import RequestError
from engine_core.sleep import SleepControl
from engine_core.state_dump import dump_state
from engine_core.utility_times import OK, UtilityTimes
from engine_core.weights import WeightControl
from stepwire.errors import InvalidRequestError, InvariantViolation, StepwireError, UnavailableError
from stepwire.grpc_errors import is_retryable

logger = logging.getLogger(__name__)

# Starts a shutdown as a signal would; without a time the configured one.
DrainRequest = Callable[[float | None, str], None]
Outcome = op.OperationResult | Future[Any]

# Looking stays possible while the engine shuts down.
_ANSWERED_WHILE_DRAINING = (op.IsPaused, op.IsSleeping, op.CheckHealth, op.DumpState, wop.GetWeightVersion)
_TOO_LATE = RequestError("DEADLINE", "the operation did not complete within the timeout of the call")


class Utilities:
    """The table of operations, and the calls that wait for their end."""

    def __init__(
        self,
        core: EngineCore,
        lifecycle: EngineLifecycle,
        input_queue: queue.SimpleQueue[InputMessage],
        output_queue: OutputQueue,
        *,
        drain: DrainRequest,
        republish_stats: Callable[[], None],
        profile_dir: Path | None,
    ) -> None:
        self._core = core
        self._output_queue = output_queue
        self._request_drain = drain
        self._pause = PauseControl(core, lifecycle)
        self._weights = WeightControl(core, self._pause, republish_stats)
        self._sleep = SleepControl(core, lifecycle, self._pause, self._weights)
        self._profile = ProfileControl(core.executor, profile_dir)
        self._pending: dict[UtilityCall, Future[op.OperationResult]] = {}
        self.times = UtilityTimes(core.clock)
        self._is_draining = False
        self._handlers: dict[type[op.Operation], Callable[[Any], Outcome]] = {
            op.ResetPrefixCache: self._reset_prefix_cache,
            op.Pause: lambda call: self._pause.pause(call.mode, clear_cache=call.clear_cache),
            op.Resume: self._resume,
            op.IsPaused: lambda _: self._pause.state(),
            op.Sleep: lambda call: self._sleep.sleep(call.level, call.pause_mode),
            op.WakeUp: lambda call: self._sleep.wake_up(call.tags),
            op.IsSleeping: lambda _: self._sleep.state(),
            op.StartProfile: lambda call: self._profile.start(call.num_steps, call.prefix, self._core.num_steps),
            op.StopProfile: lambda _: self._profile.stop(),
            op.DumpState: lambda call: dump_state(core, input_queue, output_queue, call),
            op.CheckHealth: lambda _: op.CheckHealthResult(core.executor.check_health()),
            op.GetSupportedTasks: lambda _: op.GetSupportedTasksResult(core.config.tasks),
            op.GetKVCacheMetadata: self._get_kv_cache_metadata,
            op.ExecuteDummyBatch: self._execute_dummy_batch,
            op.Drain: self._drain,
            # Text models have no such caches: those that are named are empty.
            op.ResetEncoderCache: lambda _: op.ResetEncoderCacheResult(),
            wop.ReloadWeights: self._with_weights(lambda call: self._weights.reload(call.path)),
            wop.StartWeightUpdate: self._with_weights(lambda call: self._weights.start_update(call.version)),
            wop.UpdateWeights: self._with_weights(self._weights.update),
            wop.FinishWeightUpdate: self._with_weights(self._weights.finish_update),
            wop.GetWeightVersion: lambda _: self._weights.version,
        }

    # -- what the loop tells -----------------------------------------------------------------------------------------

    def handle(self, call: UtilityCall) -> list[EngineCoreOutput]:
        """Run one operation; its answer goes out now, or when what it waits for has happened.

        Returns the news of the steps in flight, which end before, and the ends of the requests it aborted.
        """
        self.times.begin(call)
        if self._is_late(call):
            self._answer(call, _TOO_LATE)
            return []
        # Some operations must not happen during a step, and none is worth an exception to the rule.
        settled = self._core.settle()
        self.on_step()
        self._handle(call)
        return settled + self._pause.take_aborted()

    def _handle(self, call: UtilityCall) -> None:
        try:
            outcome = self._run(call.operation)
        except (InvariantViolation, ExecutorFailedError):
            raise
        except Exception as error:
            self._answer(call, _as_error(error))
            return
        if isinstance(outcome, Future):
            self._pending[call] = outcome
            self._answer_completed()
        else:
            self._answer(call, _TOO_LATE if self._is_late(call) else outcome)

    def on_idle(self) -> None:
        """There is nothing to schedule, which is what pauses wait for."""
        self._pause.on_idle()
        self._sleep.on_idle()
        self._answer_completed()

    @property
    def sleep_state(self) -> op.IsSleepingResult:
        """For scrapes: what sleeps now."""
        return self._sleep.state()

    def on_step(self) -> None:
        self._profile.on_step(self._core.num_steps)

    def expire(self) -> None:
        """Answer the calls whose time is over; their operations go on."""
        for call in [call for call in self._pending if self._is_late(call)]:
            del self._pending[call]
            self._answer(call, _TOO_LATE)

    @property
    def next_deadline(self) -> float | None:
        return min((call.deadline for call in self._pending if call.deadline is not None), default=None)

    def begin_drain(self) -> bool:
        """The engine shuts down: nothing is held back any more. False = its requests can not end by themselves."""
        self._is_draining = True
        self._sleep.end(_draining_error())
        self._weights.end()
        can_run = not self._sleep.has_released_memory
        if can_run:
            self._pause.end(_draining_error())
        self._answer_completed()
        return can_run

    # -- answers -----------------------------------------------------------------------------------------------------

    def _run(self, operation: op.Operation) -> Outcome:
        if self._is_draining and not isinstance(operation, _ANSWERED_WHILE_DRAINING):
            raise _draining_error()
        return self._handlers[type(operation)](operation)

    def _answer_completed(self) -> None:
        for call, future in [entry for entry in self._pending.items() if entry[1].done()]:
            del self._pending[call]
            error = future.exception()
            self._answer(call, future.result() if error is None else _as_error(error))

    def _answer(self, call: UtilityCall, outcome: op.OperationResult | RequestError) -> None:
        self.times.end(call, outcome.reason if isinstance(outcome, RequestError) else OK)
        self._output_queue.put(call.session_id, UtilityResult(call.call_id, outcome))

    def _is_late(self, call: UtilityCall) -> bool:
        return call.deadline is not None and self._core.clock() >= call.deadline

    # -- handlers ----------------------------------------------------------------------------------------------------

    def _reset_prefix_cache(self, call: op.ResetPrefixCache) -> op.ResetPrefixCacheResult:
        is_reset = self._core.reset_prefix_cache(reset_running_requests=call.reset_running_requests)
        return op.ResetPrefixCacheResult(is_reset, self._core.scheduler.kv_cache_manager.pool.num_used)

    def _resume(self, _: op.Resume) -> op.ResumeResult:
        self._sleep.require_awake()
        self._weights.require_no_update()
        return self._pause.resume()

    def _with_weights(self, change: Callable[[Any], op.OperationResult]) -> Callable[[Any], op.OperationResult]:
        def handler(call: Any) -> op.OperationResult:
            self._sleep.require_weights()
            return change(call)

        return handler

    def _get_kv_cache_metadata(self, _: op.GetKVCacheMetadata) -> op.GetKVCacheMetadataResult:
        config = self._core.config
        return op.GetKVCacheMetadataResult(config.block_size, config.num_blocks, config.kv_cache_layout.groups)

    def _execute_dummy_batch(self, call: op.ExecuteDummyBatch) -> op.ExecuteDummyBatchResult:
        self._sleep.require_awake()
        limit = self._core.config.max_num_batched_tokens
        if call.num_tokens > limit:
            raise InvalidRequestError(f"num_tokens: {call.num_tokens} is above max_num_batched_tokens ({limit})")
        started = time.perf_counter()
        self._core.executor.execute_dummy_batch(call.num_tokens or 1)
        return op.ExecuteDummyBatchResult(time.perf_counter() - started)

    def _drain(self, call: op.Drain) -> op.DrainResult:
        self._request_drain(call.timeout_s, call.reason)
        return op.DrainResult(len(self._core.scheduler.requests))


def _draining_error() -> UnavailableError:
    return UnavailableError("the engine is shutting down", reason="DRAINING", retry_after_ms=1000)


def _as_error(error: BaseException) -> RequestError:
    if isinstance(error, StepwireError):
        retry_after_ms = error.retry_after_ms
        return RequestError(error.reason, error.message, is_retryable(error), retry_after_ms, type(error).__name__)
    logger.error("a utility call failed", exc_info=error)
    return RequestError("UTILITY_FAILED", f"the operation failed: {error}", cause_type=type(error).__name__)
