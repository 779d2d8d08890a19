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
    STALLED = enum.auto()
    DRAINING = enum.auto()
    DEAD = enum.auto()


# Anything else is ignored: a watchdog that reports STALLED during a drain must not hide the drain.
_TRANSITIONS: dict[EngineState, frozenset[EngineState]] = {
    EngineState.STARTING: frozenset({EngineState.WARMING_UP, EngineState.DRAINING, EngineState.DEAD}),
    EngineState.WARMING_UP: frozenset({EngineState.RUNNING, EngineState.DRAINING, EngineState.DEAD}),
    EngineState.RUNNING: frozenset({EngineState.STALLED, EngineState.DRAINING, EngineState.DEAD}),
    EngineState.STALLED: frozenset({EngineState.RUNNING, EngineState.DRAINING, EngineState.DEAD}),
    EngineState.DRAINING: frozenset({EngineState.DEAD}),
    EngineState.DEAD: frozenset(),
}

Listener = Callable[[EngineState], None]


class EngineLifecycle:
    """Current state, who wants to hear of changes, and waiting for the end of the start-up."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = EngineState.STARTING
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
            self._state = state
            for listener in self._listeners:
                listener(state)
            self._changed.notify_all()
            return True

    def wait_started(self, timeout_s: float | None) -> EngineState:
        """Wait until the model is loaded and warm, or the start-up has failed; returns the state then."""
        with self._changed:
            self._changed.wait_for(lambda: self._state not in (EngineState.STARTING, EngineState.WARMING_UP), timeout_s)
            return self._state
