"""Residency of KV blocks: what is measured when, and for which blocks."""

from __future__ import annotations

import pytest

from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.residency import RESIDENCY_BUCKETS, BlockResidency
from fakes.looped_engine import LoopedEngine
from stepwire.histogram import Histogram


def found(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), histogram.total


def make_pool(num_blocks: int = 3) -> tuple[BlockPool, BlockResidency]:
    pool = BlockPool(num_blocks)
    pool.residency = BlockResidency(sample=1.0)
    return pool, pool.residency


def test_a_life_from_allocation_over_hits_to_eviction() -> None:
    pool, residency = make_pool(num_blocks=2)
    residency.now = 10.0
    [block] = pool.allocate(1)
    pool.register(block, b"hash", [1])
    residency.now = 12.0
    pool.free([block])
    residency.now = 15.0
    pool.touch([block])
    pool.free([block])
    residency.now = 22.0
    assert found(residency.lifetimes) == (0, 0.0)
    pool.allocate(1)
    assert found(residency.reuse_gaps) == (1, 5.0)
    assert found(residency.lifetimes) == (1, 12.0)
    assert found(residency.idle_before_evict) == (1, 7.0)


def test_blocks_without_content_and_a_reset_are_no_evictions() -> None:
    pool, residency = make_pool()
    first, second = pool.allocate(2)
    pool.register(first, b"hash", [1])
    pool.free([first, second])
    assert pool.reset_prefix_cache()
    residency.now = 5.0
    pool.free(pool.allocate(2))
    pool.allocate(2)
    assert found(residency.lifetimes) == found(residency.idle_before_evict) == (0, 0.0)


def test_a_new_content_begins_a_new_life() -> None:
    pool, residency = make_pool(num_blocks=2)
    [block] = pool.allocate(1)
    pool.free([block])
    residency.now = 100.0
    [block] = pool.allocate(1)
    pool.register(block, b"hash", [1])
    pool.free([block])
    residency.now = 103.0
    pool.allocate(1)
    assert found(residency.lifetimes) == (1, 3.0)


@pytest.mark.parametrize("sample", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("period", [1, 10, 100])
def test_the_sample_has_its_size_at_every_place_of_equal_requests(sample: float, period: int) -> None:
    """Were every 100th block sampled, requests of 100 blocks would show the same block again and again."""
    residency = BlockResidency(sample)
    num_sampled = 0
    for index in range(100_000):
        residency.allocated(1)
        before = sum(residency.lifetimes.counts)
        residency.evicted(1)
        if index % period == 0:
            num_sampled += sum(residency.lifetimes.counts) - before
    assert num_sampled == pytest.approx(sample * 100_000 / period, rel=0.2)


def test_bounds_belong_to_their_bucket() -> None:
    histogram = Histogram(RESIDENCY_BUCKETS)
    for duration_s in (0.0, 0.001, 0.0011, 1800.0, 1801.0):
        histogram.observe(duration_s)
    assert histogram.counts[:2] == [2, 1]
    assert histogram.counts[-2:] == [1, 1]
    assert len(histogram.counts) == len(RESIDENCY_BUCKETS) + 1


def test_the_engine_measures_on_demand_and_by_the_time_of_its_steps() -> None:
    engine = LoopedEngine(block_size=4, num_blocks=3, kv_cache_metrics=True, kv_cache_metrics_sample=1.0)
    engine.now = 1.0
    engine.add(1, num_prompt=5, max_tokens=1)
    engine.run()
    engine.now = 31.0
    engine.add(2, num_prompt=7, max_tokens=1)
    engine.run()
    residency = engine.scheduler.kv_cache_manager.pool.residency
    assert residency is not None
    assert found(residency.lifetimes) == (1, 30.0)


def test_the_engine_measures_nothing_by_default() -> None:
    assert LoopedEngine().scheduler.kv_cache_manager.pool.residency is None
