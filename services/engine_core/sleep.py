"""Sleeping: memory given back during a pause, and brought back part by part. Owner: the busy-loop thread."""

from __future__ import annotations

from concurrent.futures import Future

from engine_core.core import EngineCore
from engine_core.lifecycle import EngineLifecycle, EngineState
from engine_core.model_executor.executor import ExecutorFailedError, MemoryPart
from engine_core.operations import IsSleepingResult, PauseMode, SleepLevel, SleepResult, WakeTag, WakeUpResult
from engine_core.pause import PauseControl
from engine_core.weights import WeightControl
from stepwire.errors import InvariantViolation, StepwireError

_MEMORY = {WakeTag.WEIGHTS: MemoryPart.WEIGHTS, WakeTag.KV_CACHE: MemoryPart.KV_CACHE}


class SleepControl:
    """Waits for the pause, then releases; scheduling resumes only when nothing sleeps any more."""

    def __init__(
        self, core: EngineCore, lifecycle: EngineLifecycle, pause: PauseControl, weights: WeightControl
    ) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._pause = pause
        self._weights = weights
        self._level: SleepLevel | None = None
        self._asleep: frozenset[WakeTag] = frozenset()
        self._pending: Future[SleepResult] | None = None

    @property
    def has_released_memory(self) -> bool:
        """The model can not run."""
        return bool(self._asleep & _MEMORY.keys())

    def state(self) -> IsSleepingResult:
        return IsSleepingResult(self._level if self._asleep else None, self._asleep)

    def sleep(self, level: SleepLevel, pause_mode: PauseMode | None) -> Future[SleepResult]:
        self._weights.require_no_update()
        if self._level is not None and self._level is not level:
            raise StepwireError(f"a sleep with level {self._level.name} holds: wake up first", reason="ENGINE_SLEEPING")
        if level is SleepLevel.DISCARD_ALL:
            self._weights.require_changeable()
        self._pause.pause(pause_mode)
        self._level = level
        if self._asleep:
            done: Future[SleepResult] = Future()
            done.set_result(SleepResult(freed_bytes=0))
            return done
        self._pending = self._pending or Future()
        return self._pending

    def wake_up(self, tags: frozenset[WakeTag]) -> WakeUpResult:
        """A part that can not be brought back raises, and stays asleep."""
        if self._pending is not None:
            raise StepwireError("a sleep is still pending", reason="PAUSE_PENDING")
        wanted = self._asleep & (tags or frozenset(WakeTag))
        if WakeTag.SCHEDULING in wanted:
            self._weights.require_no_update()
        for tag, part in _MEMORY.items():
            if tag in wanted:
                self._restore(part)
                self._asleep -= {tag}
        if WakeTag.SCHEDULING in wanted and not self.has_released_memory:
            self._asleep = frozenset()
            self._pause.resume()
        if not self._asleep:
            self._level = None
        return WakeUpResult(self._asleep)

    def require_awake(self) -> None:
        """For operations that make no sense while something sleeps, or is about to."""
        if self._level is not None:
            raise StepwireError("the engine sleeps: wake it up first", reason="ENGINE_SLEEPING")

    def require_weights(self) -> None:
        """For operations that change the weights, which may happen while only the KV cache sleeps."""
        if self._pending is not None or WakeTag.WEIGHTS in self._asleep:
            raise StepwireError("the weights sleep: wake them up first", reason="ENGINE_SLEEPING")

    def on_idle(self) -> None:
        """The loop has nothing to do: when the pause is complete, the sleep begins."""
        if self._pending is None or not self._pause.is_complete:
            return
        pending, self._pending = self._pending, None
        if self._level is not SleepLevel.PAUSE_ONLY:
            self._core.reset_prefix_cache(reset_running_requests=True)
        try:
            freed_bytes = self._release_memory()
        except (InvariantViolation, ExecutorFailedError):
            raise
        except Exception as error:
            # What was given back, all of it or in part, sleeps and can be woken up.
            pending.set_exception(error)
        else:
            pending.set_result(SleepResult(freed_bytes))
        self._asleep |= {WakeTag.SCHEDULING}
        self._lifecycle.move_to(EngineState.SLEEPING)

    def end(self, error: StepwireError) -> None:
        """The engine shuts down: a sleep that has not begun never will."""
        if self._pending is not None:
            self._pending.set_exception(error)
            self._pending, self._level = None, None

    def _release_memory(self) -> int:
        freed_bytes = 0
        if self._level is not SleepLevel.PAUSE_ONLY:
            for tag, part in _MEMORY.items():
                # Before the attempt: one that fails may have got half way.
                self._asleep |= {tag}
                freed_bytes += self._release(part)
        return freed_bytes

    def _release(self, part: MemoryPart) -> int:
        if part is MemoryPart.WEIGHTS and self._level is SleepLevel.DISCARD_ALL:
            return self._weights.discard()
        return self._core.executor.release_memory(part)

    def _restore(self, part: MemoryPart) -> None:
        if part is MemoryPart.WEIGHTS and self._level is SleepLevel.DISCARD_ALL:
            self._weights.restore_discarded()
        else:
            self._core.executor.restore_memory(part)
