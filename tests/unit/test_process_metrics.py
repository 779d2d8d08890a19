"""What a process tells of itself, and that it lets go of the interpreter's hooks."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading

import pytest
from prometheus_client import CollectorRegistry

from stepwire.histogram import Histogram
from stepwire.lag import InterpreterLag, watch_loop_lag
from stepwire.metric_rows import histogram
from stepwire.process_metrics import ProcessMetrics, ProcessRows

ROWS = ProcessRows(
    "engine_core", histogram("stepwire_engine_core_interpreter_lag_seconds", "Lag.", (0.1,), ("thread",))
)


class Told(Histogram):
    """Says when it has observed something."""

    __slots__ = ("said", "said_async")

    def __init__(self) -> None:
        super().__init__((0.1,))
        self.said = threading.Event()
        self.said_async = asyncio.Event()

    def observe(self, value: float) -> None:
        super().observe(value)
        self.said.set()
        self.said_async.set()


def test_the_build_is_told_with_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWIRE_BUILD_REVISION", "abc123")
    registry = CollectorRegistry()
    ProcessMetrics(ROWS, registry, ("sampler",))
    [family] = [one for one in registry.collect() if one.name == "stepwire_engine_core_build_info"]
    assert [(sample.labels["revision"], sample.value) for sample in family.samples] == [("abc123", 1)]


def test_collections_and_log_records_count_between_start_and_stop() -> None:
    registry = CollectorRegistry()
    metrics = ProcessMetrics(ROWS, registry, ("sampler",))

    def values() -> tuple[float | None, float | None]:
        pauses = registry.get_sample_value("stepwire_engine_core_gc_pause_seconds_count", {"generation": "2"})
        return pauses, registry.get_sample_value("stepwire_engine_core_log_records_total", {"level": "ERROR"})

    def happen() -> None:
        gc.collect()
        logging.getLogger("anywhere").error("something")

    happen()
    assert values() == (0, 0)
    metrics.start()
    try:
        happen()
        assert values() == (1, 1)
    finally:
        metrics.stop()
    happen()
    assert values() == (1, 1)
    assert registry.get_sample_value("process_resident_memory_bytes")


async def test_a_loop_that_is_held_up_shows_in_its_lag(monkeypatch) -> None:
    lag = Told()
    monkeypatch.setattr("stepwire.lag.INTERVAL_S", 0.001)
    watching = asyncio.create_task(watch_loop_lag(lag))
    await asyncio.sleep(0)
    # Nothing else runs meanwhile, the timer included.
    threading.Event().wait(0.05)
    await asyncio.wait_for(lag.said_async.wait(), 30)
    watching.cancel()
    assert lag.total > 0.04


def test_a_thread_notes_how_late_it_gets_the_interpreter() -> None:
    lag = Told()
    sampler = InterpreterLag(lag)
    sampler.start()
    assert lag.said.wait(30)
    sampler.stop()
    assert lag.count >= 1
