"""All live sessions: who replaces whom, who is cut, and since when there is none (for `--owner session`)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from opentelemetry.trace import SpanContext

from engine_core.reason_counter import ReasonCounter
from engine_core.scheduler.request import RequestKey
from engine_core.session import Session, SessionError

SESSION_EVENTS = ("opened", "replaced", "cut_slow", "closed")


class Sessions:
    """Registry by session id. Used by the streams' threads and the monitor."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._empty_since = clock()
        self.events = ReasonCounter(SESSION_EVENTS)

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session: Session) -> Session | None:
        """Register; returns the live session with the same id that this one replaces."""
        with self._lock:
            replaced = self._sessions.get(session.session_id)
            self._sessions[session.session_id] = session
        self.events.add("opened")
        if replaced is not None:
            self.events.add("replaced")
        return replaced

    def close(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.session_id) is session:
                del self._sessions[session.session_id]
                self._empty_since = self._clock()
        self.events.add("closed")

    def all(self) -> list[Session]:
        """Those that are live now."""
        with self._lock:
            return list(self._sessions.values())

    def trace_context(self, key: RequestKey) -> SpanContext | None:
        """The span of a request that is traced. Takes no lock: the busy loop asks."""
        session = self._sessions.get(key[0])
        return None if session is None else session.traces.context_of(key[1])

    def start_waiting(self) -> None:
        """Serving begins: the time the model took to load is nobody's absence."""
        with self._lock:
            self._empty_since = self._clock()

    def empty_for_s(self) -> float:
        """How long nobody has been connected; 0 while somebody is."""
        with self._lock:
            return 0.0 if self._sessions else self._clock() - self._empty_since

    def cut(self, session_id: str) -> None:
        """End a session whose frontend does not read: its memory is worth more than its place in line.

        Called again while the session is still there: its output thread then hangs in a write that flow control
        holds, and only a cancel, which has no reason to give, frees it.
        """
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None:
            return
        if session.error is None:
            self.events.add("cut_slow")
            session.fail(SessionError("SLOW_CLIENT", "the frontend does not read its outputs"))
        else:
            session.cancel_stream()
