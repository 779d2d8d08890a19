"""What the streams to engines count: frames, round trips of pings, reconnects. Owner: the event loop."""

from __future__ import annotations

from collections import Counter

from frontend.engine_client.clock_offset import ClockOffset
from frontend.engine_client.outbox import Outbox
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.histogram import Histogram
from stepwire.metrics import WIDE_BUCKETS
from stepwire.stream_meter import StreamMeter

THROUGH = ("io", "step_loop")
# new_boot: another life of the engine; expired: the same life, which had ended our requests with the stream.
RECONNECTS = ("new_boot", "expired")
_SENT = tuple(field.name for field in pb.ConnectRequest.DESCRIPTOR.oneofs_by_name["message"].fields)
_RECEIVED = tuple(field.name for field in pb.ConnectResponse.DESCRIPTOR.oneofs_by_name["message"].fields)


class TransportStats:
    """One for all connections of a frontend."""

    def __init__(self) -> None:
        self.meter = StreamMeter(_SENT, _RECEIVED)
        # Of the streams that are open.
        self.outboxes: list[Outbox] = []
        # (engine id, through)
        self.pings: dict[tuple[str, str], Histogram] = {}
        # By engine id: of the life that is attached, or was last.
        self.clocks: dict[str, ClockOffset] = {}
        # (engine id, result)
        self.reconnects: Counter[tuple[str, str]] = Counter()

    @property
    def num_unsent(self) -> int:
        """Requests and frames that wait to be written to engines."""
        return sum(map(len, list(self.outboxes)))

    def expect(self, engine_id: str) -> None:
        """Its series begin with 0."""
        for through in THROUGH:
            self._of(engine_id, through)
        for result in RECONNECTS:
            self.reconnects[engine_id, result] += 0

    def ponged(self, engine_id: str, seconds: float, *, through_step_loop: bool) -> None:
        """A ping came back after this time."""
        self._of(engine_id, THROUGH[through_step_loop]).observe(seconds)

    def reconnected(self, engine_id: str, *, is_new_boot: bool) -> None:
        """An engine that was lost is attached again."""
        self.reconnects[engine_id, RECONNECTS[not is_new_boot]] += 1

    def _of(self, engine_id: str, through: str) -> Histogram:
        return self.pings.setdefault((engine_id, through), Histogram(WIDE_BUCKETS))
