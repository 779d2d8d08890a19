"""Frames of the engine stream by direction and kind: how many, how many bytes, how long they took to make and to read.

Sits where messages become bytes and back, on both sides of the stream. Any thread; costs a frame two clock calls and
a short lock that no loop of the engine ever wants.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import Metric

from stepwire.histogram import Histogram
from stepwire.metric_rows import MetricRow, counter, histogram
from stepwire.metrics import FAST_BUCKETS

# A kind that a newer peer may have.
UNKNOWN_KIND = "unknown"


class _Frames:
    """One kind in one direction."""

    __slots__ = ("num", "num_bytes", "times")

    def __init__(self) -> None:
        self.num = 0
        self.num_bytes = 0
        self.times = Histogram(FAST_BUCKETS)


class _Spent(threading.local):
    """Time that this thread has spent on a frame before or behind its bytes."""

    sending = 0.0
    receiving = 0.0


class StreamMeter:
    """One for all streams of a process; kinds are the names of the oneof `message`."""

    def __init__(self, sent: Iterable[str], received: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._sent = {kind: _Frames() for kind in (*sent, UNKNOWN_KIND)}
        self._received = {kind: _Frames() for kind in (*received, UNKNOWN_KIND)}
        self._spent = _Spent()

    def serializer(self, serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        """The same, and it counts."""

        def counted(message: Any) -> bytes:
            began = time.perf_counter()
            data = serialize(message)
            spent, self._spent.sending = self._spent.sending, 0.0
            self._note(self._sent, message, len(data), spent + time.perf_counter() - began)
            return data

        return counted

    def deserializer(self, deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """The same, and it counts; its time is that of the next `read` in this thread."""

        def counted(data: bytes) -> Any:
            began = time.perf_counter()
            message = deserialize(data)
            self._note(self._received, message, len(data), None)
            self._spent.receiving = time.perf_counter() - began
            return message

        return counted

    def made(self, seconds: float) -> None:
        """The message that this thread gives to the stream next took so long to make."""
        self._spent.sending = seconds

    def read(self, kind: str | None, seconds: float) -> None:
        """A message that came in took so long to understand."""
        spent, self._spent.receiving = self._spent.receiving, 0.0
        with self._lock:
            _of(self._received, kind).times.observe(spent + seconds)

    def _note(self, frames: dict[str, _Frames], message: Any, num_bytes: int, seconds: float | None) -> None:
        found = _of(frames, message.WhichOneof("message"))
        with self._lock:
            found.num += 1
            found.num_bytes += num_bytes
            if seconds is not None:
                found.times.observe(seconds)

    def collect(self, rows: StreamRows, labels: tuple[str, ...]) -> Iterator[Metric]:
        """The families, each series with these labels first."""
        both = (("out", self._sent), ("in", self._received))
        kinds = [((*labels, way, kind), found) for way, frames in both for kind, found in frames.items()]
        yield rows.frames.family((values, found.num) for values, found in kinds)
        yield rows.bytes.family((values, found.num_bytes) for values, found in kinds)
        for row, frames in ((rows.encode, self._sent), (rows.decode, self._received)):
            yield row.histogram_family(((*labels, kind), found.times) for kind, found in frames.items())


class StreamRows:
    """The rows of one service."""

    def __init__(self, service: str, labels: tuple[str, ...]) -> None:
        prefix = f"stepwire_{service}_"
        by_kind, by_way = (*labels, "kind"), (*labels, "direction", "kind")
        self.frames = counter(f"{prefix}stream_frames_total", "Frames of the engine streams.", by_way)
        self.bytes = counter(f"{prefix}stream_bytes_total", "Bytes of these frames, before HTTP/2.", by_way)
        self.encode = histogram(f"{prefix}frame_encode_seconds", "From news to bytes.", FAST_BUCKETS, by_kind)
        self.decode = histogram(f"{prefix}frame_decode_seconds", "From bytes to news.", FAST_BUCKETS, by_kind)

    @property
    def all(self) -> tuple[MetricRow, ...]:
        return (self.frames, self.bytes, self.encode, self.decode)


def _of(frames: dict[str, _Frames], kind: str | None) -> _Frames:
    return frames.get(kind or UNKNOWN_KIND) or frames[UNKNOWN_KIND]
