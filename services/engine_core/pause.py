"""Pausing: what holds the scheduler back, and when that is complete. Owner: the busy-loop thread.

A pause is asked for, holds back at once, and completes when the loop finds nothing left to do in the sense of its mode.
No thread waits for it: the loop calls `on_idle`.
"""

from __future__ import annotations

from concurrent.futures import Future

from engine_core.core import EngineCore
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.operations import IsPausedResult, PauseMode, PauseResult, ResumeResult
from engine_core.scheduler.output import EngineCoreOutput
from engine_core.scheduler.pause_state import PauseState
from stepwire.errors import InvalidRequestError, StepwireError

_STATES = {PauseMode.ABORT: PauseState.ALL, PauseMode.WAIT: PauseState.NEW, PauseMode.KEEP: PauseState.ALL}


class PauseControl:
    """One pause at a time; calls for the same mode join it."""

    def __init__(self, core: EngineCore, lifecycle: EngineLifecycle) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._mode: PauseMode | None = None
        self._num_aborted = 0
        # Ends of aborted requests that nobody has been told of.
        self._aborted: list[EngineCoreOutput] = []
        self._clears_cache = False
        # Set while the pause is pending; every caller that joined waits for it.
        self._pending: Future[PauseResult] | None = None

    @property
    def is_complete(self) -> bool:
        return self._mode is not None and self._pending is None

    def state(self) -> IsPausedResult:
        return IsPausedResult(self._mode, self._pending is not None)

    def pause(self, mode: PauseMode | None, *, clear_cache: bool = False) -> Future[PauseResult]:
        """Hold back from now on. None = whatever pause is in force; there must be one."""
        if self._mode is None:
            if mode is None:
                raise InvalidRequestError("pause_mode: is needed, because the engine is not paused")
            self._begin(mode)
        elif mode not in (None, self._mode):
            raise StepwireError(
                f"a pause with mode {self._mode.name} {'is pending' if self._pending else 'holds'}: resume first",
                reason="PAUSE_PENDING" if self._pending else "ENGINE_PAUSED",
            )
        if self._pending is None:
            return self._joined_late(clear_cache)
        self._clears_cache |= clear_cache
        return self._pending

    def resume(self) -> ResumeResult:
        if self._pending is not None:
            raise StepwireError("a pause is still pending", reason="PAUSE_PENDING")
        was_paused = self._mode is not None
        self._release()
        return ResumeResult(was_paused)

    def take_aborted(self) -> list[EngineCoreOutput]:
        """The ends that the last call caused, for the loop to hand out."""
        aborted, self._aborted = self._aborted, []
        return aborted

    def on_idle(self) -> None:
        """The loop has nothing to do: a pending pause is complete."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if self._clears_cache:
            self._core.reset_prefix_cache(reset_running_requests=True)
        self._lifecycle.move_to(EngineState.PAUSED)
        pending.set_result(self._result())

    def end(self, error: StepwireError) -> None:
        """The engine shuts down: whoever waits is told, and what is held goes on, to end within the drain."""
        if self._pending is not None:
            self._pending.set_exception(error)
            self._pending = None
        self._release()

    def _begin(self, mode: PauseMode) -> None:
        self._mode = mode
        self._clears_cache = False
        self._pending = Future()
        self._core.scheduler.pause_state = _STATES[mode]
        if mode is PauseMode.ABORT:
            self._aborted = self._core.abort_requests(None, "requested")
        self._num_aborted = len(self._aborted)

    def _joined_late(self, clear_cache: bool) -> Future[PauseResult]:
        if clear_cache:
            self._core.reset_prefix_cache(reset_running_requests=True)
        done: Future[PauseResult] = Future()
        done.set_result(self._result())
        return done

    def _result(self) -> PauseResult:
        num_held = len(self._core.scheduler.requests) if self._mode is PauseMode.KEEP else 0
        return PauseResult(self._num_aborted, num_held)

    def _release(self) -> None:
        self._mode = None
        self._core.scheduler.pause_state = PauseState.NONE
        self._lifecycle.move_to(EngineState.RUNNING)
