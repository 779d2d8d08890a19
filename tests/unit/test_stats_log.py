"""The engine's regular line of figures."""

from __future__ import annotations

import logging

import pytest

from engine_core.scheduler.output import SchedulerStats
from engine_core.stats_log import StatsLog
from engine_core.step_times import StepKind, StepTimes

BUSY = SchedulerStats(
    num_running=3,
    num_waiting=2,
    num_waiting_deferred=1,
    num_used_blocks=5,
    num_total_blocks=20,
    num_prompt_tokens=300,
    num_cached_prompt_tokens=100,
    num_generation_tokens=450,
    num_preemptions=4,
    prefix_query_tokens=300,
    prefix_hit_tokens=100,
)


@pytest.fixture
def times() -> StepTimes:
    return StepTimes(8, 64)


def steps(times: StepTimes, durations: list[float]) -> None:
    for duration in durations:
        times.durations[StepKind.DECODE].observe(duration)
        times.execute.observe(0.75 * duration)


def test_a_line_tells_rates_of_its_own_interval(times: StepTimes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = StatsLog(10, now=100.0)
    steps(times, [0.008] * 99 + [0.04])
    log.look(BUSY, times, 109.9)
    assert caplog.messages == []
    log.look(BUSY, times, 110.0)
    assert caplog.messages == [
        "prompt 20 tok/s, generation 45 tok/s, 3 running, 2 waiting (1 deferred), 4 preemptions, KV 25.0 %, "
        "prefix hits 33.3 %, step p50 < 10 ms, p99 < 10 ms, loop share 25 %"
    ]
    steps(times, [0.04])
    log.look(BUSY, times, 120.0)
    assert caplog.messages[1].startswith("prompt 0 tok/s, generation 0 tok/s, 3 running")
    assert caplog.messages[1].endswith("step p50 < 50 ms, p99 < 50 ms, loop share 25 %")


def test_an_idle_engine_says_so_once(times: StepTimes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log = StatsLog(10, now=0.0)
    log.look(SchedulerStats(), times, 10.0)
    steps(times, [0.01])
    log.look(SchedulerStats(), times, 20.0)
    log.look(SchedulerStats(), times, 30.0)
    log.look(SchedulerStats(), times, 40.0)
    assert [record.levelname for record in caplog.records] == ["DEBUG", "INFO", "INFO", "DEBUG"]


def test_no_interval_no_lines(times: StepTimes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    StatsLog(0, now=0.0).look(BUSY, times, 1e6)
    assert caplog.messages == []
