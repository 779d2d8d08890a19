"""The engine's state machine: the only source of health answers. Safe to read and set from any thread."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable


class EngineState(enum.Enum):
    """The names are those of stepwire.v1.EngineState on the wire."""

    STARTING = enum.auto()
    WARMING_UP = enum.auto()
    RUNNING = enum.auto()
    # Requests are held, not refused.
    PAUSED = enum.auto()
    # Memory may be given back: the engine can not serve.
    SLEEPING = enum.auto()
    STALLED = enum.auto()
    DRAINING = enum.auto()
    DEAD = enum.auto()


_ENDS = frozenset({EngineState.DRAINING, EngineState.DEAD})
# Between these the step loop moves as utilities tell it, and the watchdog puts STALLED on top.
_SERVING = frozenset({EngineState.RUNNING, EngineState.PAUSED, EngineState.SLEEPING})

# Anything else is ignored: a watchdog that reports STALLED during a drain must not hide the drain.
_TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.STARTING: _ENDS | {EngineState.WARMING_UP},
    EngineState.WARMING_UP: _ENDS | {EngineState.RUNNING},
    **{state: _ENDS | (_SERVING - {state}) | {EngineState.STALLED} for state in _SERVING},
    EngineState.STALLED: _ENDS | _SERVING,
    EngineState.DRAINING: frozenset({EngineState.DEAD}),
    EngineState.DEAD: frozenset(),
}

Listener = Callable[[EngineState], None]


class EngineLifecycle:
    """Current state, who wants to hear of changes, and waiting for the end of the start-up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = EngineState.STARTING
        self._before_stall = EngineState.RUNNING
        self._listeners: list[Listener] = []

    @property
    def state(self) -> EngineState:
        return self._state

    def listen(self, listener: Listener) -> None:
        """Call `listener` now and at every change, on the thread that makes the change."""
        with self._changed:
            self._listeners.append(listener)
            listener(self._state)

    def move_to(self, state: EngineState) -> bool:
        """Change the state; False, and nothing happens, when that is no transition."""
        with self._changed:
            if state not in _TRANSITIONS[self._state]:
                return False
            if state is EngineState.STALLED:
                self._before_stall = self._state
            self._state = state
            for listener in self._listeners:
                listener(state)
            self._changed.notify_all()
            return True

    def end_stall(self) -> bool:
        """From STALLED back to the state before; False when the engine is not STALLED, or no longer."""
        with self._changed:
            return self._state is EngineState.STALLED and self.move_to(self._before_stall)

    def wait_started(self, timeout_s: float | None) -> EngineState:
        """Wait until the model is loaded and warm, or the start-up has failed; returns the state then."""
        with self._changed:
            self._changed.wait_for(lambda: self._state not in (EngineState.STARTING, EngineState.WARMING_UP), timeout_s)
            return self._state
