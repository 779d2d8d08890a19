"""Storms of short requests through the engine core: each ends exactly once, and nothing of them stays.

The rows are those of the regression checklist, engine-semantics.md §14.
"""

from __future__ import annotations

import gc
import sys

import psutil
import pytest

from engine_core.scheduler.request import Request
from fakes.request_storm import RequestStorm, StormShape

MIB = 2**20
NUM_SOAKED = 200_000
# A run shows a tenth of one. One object left behind by each of 100 000 requests is above it.
MAX_GROWTH_BYTES = 8 * MIB


def resident_bytes() -> int:
    gc.collect()
    resident: int = psutil.Process().memory_info().rss
    return resident


def blow_and_weigh(storm: RequestStorm, capsys: pytest.CaptureFixture[str]) -> int:
    """All requests; returns how much the process grew while the second half ran."""
    storm.blow(storm.shape.num_requests // 2)
    half = resident_bytes()
    storm.blow(storm.shape.num_requests)
    storm.settle()
    growth = resident_bytes() - half
    with capsys.disabled():
        sys.stdout.write(f"\n{storm.num_ended} requests: {dict(storm.ends)}, {storm.num_preemptions} preemptions, ")
        sys.stdout.write(f"resident memory {half / MIB:.1f} MiB and {growth / MIB:+.2f} MiB in the last half\n")
    return growth


def assert_nothing_is_left(storm: RequestStorm) -> None:
    assert storm.num_ended == storm.num_added == storm.shape.num_requests
    assert storm.scheduler.check_integrity() == []
    assert storm.scheduler.stats().num_used_blocks == 0
    assert storm.executor.num_known_requests == 0
    assert len(storm.outbox) == 0


@pytest.mark.regression(12)
def test_aborts_deadlines_and_preemptions_in_a_cache_of_40_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    shape = StormShape(5000, max_live=40, max_shared_tokens=32, max_tokens=24, abort_rate=0.2, deadline_rate=0.3)
    storm = RequestStorm(shape, seed=1, num_blocks=40, max_num_seqs=16, max_num_batched_tokens=64)
    growth = blow_and_weigh(storm, capsys)
    assert_nothing_is_left(storm)
    assert storm.ends.keys() == {"STOP", "LENGTH", "ABORTED", "DEADLINE", "QUEUE_TIMEOUT"}
    assert min(storm.ends.values()) > 100
    assert storm.num_preemptions > 500
    assert growth < MAX_GROWTH_BYTES


@pytest.mark.slow
@pytest.mark.regression(19)
def test_soak_of_200_000_short_requests(capsys: pytest.CaptureFixture[str]) -> None:
    storm = RequestStorm(StormShape(NUM_SOAKED, max_live=256, max_tokens=4), seed=2, num_blocks=1024)
    assert blow_and_weigh(storm, capsys) < MAX_GROWTH_BYTES
    assert_nothing_is_left(storm)
    assert storm.ends.keys() == {"STOP", "LENGTH"}


@pytest.mark.regression(20)
def test_a_thousand_requests_leave_no_request_behind_without_the_collector() -> None:
    """Through the whole engine core, ends of every kind included: no reference cycle holds one."""
    storm = RequestStorm(StormShape(1000, 40, 32, 24, abort_rate=0.2, deadline_rate=0.3), seed=3, num_blocks=40)
    gc.collect()
    gc.disable()
    try:
        num_before = num_request_objects()
        storm.blow(500)
        assert num_request_objects() > num_before
        storm.blow(500)
        storm.settle()
        assert num_request_objects() == num_before
    finally:
        gc.enable()
    assert_nothing_is_left(storm)


def num_request_objects() -> int:
    return sum(type(found) is Request for found in gc.get_objects())
