"""Which pings are unanswered, and what that means. No clock and no I/O of its own: time is an argument.

No pong of the I/O thread means that the connection is lost, unless other frames come: a pong may lie behind them,
unread. Nor does silence count while this process could not have heard anything. No pong of the step loop while the
I/O thread answers means that the engine is slow, not dead: it gets no new requests until it answers, whatever else it
sends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from stepwire.engine.v1 import engine_core_pb2 as pb

# An engine that does not say how to ping it.
DEFAULT_INTERVAL_S = 5.0
DEFAULT_TIMEOUT_S = 15.0
# A step loop that is silent for longer gets no new requests.
STALL_S = 30.0


class Heartbeat:
    """The pings of one session."""

    def __init__(self, interval_s: float, timeout_s: float) -> None:
        self.interval_s = interval_s or DEFAULT_INTERVAL_S
        self._timeout_s = timeout_s or DEFAULT_TIMEOUT_S
        self._num_pings = 0
        # (nonce, when sent), oldest first
        self._io: deque[tuple[int, float]] = deque()
        self._step_loop: deque[tuple[int, float]] = deque()
        self._heard_at = -math.inf

    def received(self) -> None:
        """A frame has come: until `heard`, nobody listens for the next one."""
        self._heard_at = math.inf

    def heard(self, now: float) -> None:
        """The frame is dealt with, and the next one is waited for."""
        self._heard_at = now

    def excuse(self, late_s: float, now: float) -> None:
        """The event loop was so late: what came meanwhile may still be unread."""
        if self._io and self._heard_at < math.inf:
            self._heard_at = min(now, self._silent_since() + late_s)

    def pings(self, now: float) -> Iterator[pb.Ping]:
        """The pings of one interval: always through the I/O thread, every second time through the step loop as well."""
        yield self._ping(self._io, now, through_step_loop=False)
        if self._num_pings % 3 == 1:
            yield self._ping(self._step_loop, now, through_step_loop=True)

    def _ping(self, unanswered: deque[tuple[int, float]], now: float, *, through_step_loop: bool) -> pb.Ping:
        self._num_pings += 1
        unanswered.append((self._num_pings, now))
        return pb.Ping(
            nonce=self._num_pings, through_step_loop=through_step_loop, client_monotonic_ns=int(now * 1_000_000_000)
        )

    def on_pong(self, pong: pb.Pong) -> float | None:
        """An answer; it also stands for all older pings of its kind. Returns when its ping was sent, if one was."""
        sent = None
        unanswered = self._step_loop if pong.through_step_loop else self._io
        while unanswered and unanswered[0][0] <= pong.nonce:
            sent = unanswered.popleft()[1]
        return sent

    def lost_at(self) -> float | None:
        """When the connection counts as lost unless something arrives; None when no ping is unanswered."""
        return self._silent_since() + self._timeout_s if self._io else None

    def _silent_since(self) -> float:
        return max(self._io[0][1], self._heard_at)

    def is_stalled(self, now: float) -> bool:
        """The step loop is silent for too long."""
        return bool(self._step_loop) and now - self._step_loop[0][1] > STALL_S
