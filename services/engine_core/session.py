"""One frontend's stream as the engine's I/O threads see it: its outbox, and which of its requests are still open.

Shared by the input thread and the output thread of the stream, hence the lock. Never touches the scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine_core.messages import OutputMessage
from engine_core.output_queue import Outbox
from engine_core.request_traces import RequestTraces
from engine_core.scheduler.output import EngineCoreOutputs
from engine_core.scheduler.request import RequestKey


@dataclass(frozen=True, slots=True)
class SessionError:
    """Why the engine ends a stream with an error status; the fields of a StepwireError."""

    reason: str
    message: str


class Session:
    """Open requests and the end of one stream."""

    def __init__(self, session_id: str, client_id: str, outbox: Outbox, traces: RequestTraces) -> None:
        self.session_id = session_id
        self.client_id = client_id
        self.outbox = outbox
        self.traces = traces
        self.batch_seq = 0
        # Ends the RPC from outside its thread.
        self.cancel_stream: Callable[[], object] = outbox.end
        # Set before the outbox ends: the status the stream ends with.
        self.error: SessionError | None = None
        self._lock = threading.Lock()
        self._live: set[int] = set()
        self._is_closed = False
        self._is_leaving = False

    def open_request(self, handle: int) -> bool:
        """A request came in. False when it must be dropped: the stream is over, or the handle is open already."""
        with self._lock:
            if self._is_closed or handle in self._live:
                return False
            self._live.add(handle)
            return True

    @property
    def is_closed(self) -> bool:
        with self._lock:
            return self._is_closed

    def live_handles(self) -> set[int]:
        with self._lock:
            return set(self._live)

    def note_written(self, message: OutputMessage) -> None:
        """Called before a message is written: its finishes close requests, and the last one may end a goodbye."""
        if not isinstance(message, EngineCoreOutputs):
            return
        self.traces.note(message.outputs, message.time)
        ended = [output.key[1] for output in message.outputs if output.finish is not None]
        if not ended:
            return
        with self._lock:
            self._live.difference_update(ended)
        self._end_if_done()

    def leave(self) -> None:
        """The frontend said goodbye: the stream ends with OK after the last open request."""
        self._is_leaving = True
        self._end_if_done()

    def fail(self, error: SessionError) -> None:
        """End the stream with an error; what waits to be written is dropped."""
        self.error = error
        self.outbox.end(discard=True)

    def close(self) -> list[RequestKey]:
        """The stream is over; returns the keys it leaves behind, for the caller to abort."""
        self.outbox.close()
        self.traces.close()
        with self._lock:
            self._is_closed = True
            return [(self.session_id, handle) for handle in sorted(self._live)]

    def _end_if_done(self) -> None:
        with self._lock:
            is_done = self._is_leaving and not self._live
        if is_done:
            self.outbox.end()
