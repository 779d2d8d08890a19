"""What both services tell of their process: versions, garbage collections, how late timers come, log records.

`start` begins to watch and `stop` leaves nothing behind, so that a test may have several in one process.
"""

from __future__ import annotations

import gc
import logging
import platform
import time
from collections.abc import Iterator, Sequence

import google.protobuf
import grpc
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric

from stepwire import __version__
from stepwire.histogram import Histogram
from stepwire.metric_rows import MetricRow, counter, gauge, histogram
from stepwire.metrics import FAST_BUCKETS

_GENERATIONS = 3
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class ProcessRows:
    """The rows of one service; `lag` is the one that differs."""

    def __init__(self, service: str, lag: MetricRow) -> None:
        prefix = f"stepwire_{service}_"
        self.build_info = gauge(
            f"{prefix}build_info", "1, labelled with versions.", ("version", "python", "grpc", "protobuf")
        )
        self.gc_pause = histogram(
            f"{prefix}gc_pause_seconds", "Collections of the cycle collector.", FAST_BUCKETS, ("generation",)
        )
        self.log_records = counter(
            f"{prefix}log_records_total",
            "Lines for the log, with the repeats that were counted and not written.",
            ("level",),
        )
        self.lag = lag

    @property
    def all(self) -> tuple[MetricRow, ...]:
        return (self.build_info, self.gc_pause, self.lag, self.log_records)


class ProcessMetrics:
    """Registers itself and the standard collectors (process_*, python_*)."""

    def __init__(self, rows: ProcessRows, registry: CollectorRegistry, lag_labels: Sequence[str] = ()) -> None:
        self._rows = rows
        self._lag_labels = tuple(lag_labels)
        # How late timers come; observed by whoever owns one.
        self.lag = Histogram(rows.lag.buckets)
        self._pauses = tuple(Histogram(FAST_BUCKETS) for _ in range(_GENERATIONS))
        self._pause_began = 0.0
        self._records = _RecordCounter()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        registry.register(self)

    def start(self) -> None:
        """Count from now on."""
        gc.callbacks.append(self._on_collection)
        logging.getLogger().addHandler(self._records)

    def stop(self) -> None:
        """Let go of the interpreter's hooks."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        logging.getLogger().removeHandler(self._records)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        rows = self._rows
        versions = (__version__, platform.python_version(), grpc.__version__, google.protobuf.__version__)
        yield rows.build_info.family([(versions, 1)])
        pauses = [((str(generation),), found) for generation, found in enumerate(self._pauses)]
        yield rows.gc_pause.histogram_family(pauses)
        yield rows.lag.histogram_family([(self._lag_labels, self.lag)])
        yield rows.log_records.family(((level,), number) for level, number in self._records.counts.copy().items())

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        """Called by the collector, which never runs twice at once."""
        if phase == "start":
            self._pause_began = time.perf_counter()
        else:
            self._pauses[info["generation"]].observe(time.perf_counter() - self._pause_began)


class _RecordCounter(logging.Handler):
    """Sees what the other handlers of the root logger write; its own lock makes the additions safe."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys(_LEVELS, 0)

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname if record.levelname in self.counts else "INFO"
        self.counts[level] += 1
