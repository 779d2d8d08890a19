"""Requests that pool, in the scheduler: they end with their prompt, and what they may read from the prefix cache."""

from __future__ import annotations

import pytest

from engine_core.scheduler.output import FinishReason, PrefillStats
from engine_core.scheduler.pooling import PoolingParams, PoolingType
from engine_core.scheduler.request import Request, StopConditions
from fakes.driven_scheduler import DrivenScheduler
from fakes.request_factory import make_request

PROMPT = list(range(50, 70))


def pooling_request(handle: int, kind: PoolingType, prompt: list[int] | int = PROMPT, **fields: object) -> Request:
    stop = StopConditions(max_tokens=0)
    return make_request(handle, prompt, stop=stop, pooling=PoolingParams(type=kind), **fields)


@pytest.mark.parametrize("kind", PoolingType)
def test_it_ends_with_the_last_chunk_of_its_prompt_and_brings_the_vector_with_the_end(kind: PoolingType) -> None:
    engine = DrivenScheduler(max_num_batched_tokens=8)
    engine.add(pooling_request(1, kind))
    assert [engine.step() for _ in range(2)] == [{}, {}]
    output = engine.step()[1]
    assert output.finish is not None
    assert (output.finish.reason, output.new_token_ids) == (FinishReason.STOP, [])
    assert output.pooled == (bytes([19]) if kind is PoolingType.LAST else bytes(range(20)))
    assert output.prefill == PrefillStats(20, 0)
    assert not output.is_plain_token
    stats = engine.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (20, 0)
    engine.run()


def test_only_the_last_token_reads_the_prefix_cache_and_all_of_them_write_it() -> None:
    engine = DrivenScheduler(num_blocks=30)
    computed = {}
    for handle, kind in enumerate((PoolingType.MEAN, PoolingType.MEAN, PoolingType.CLS, PoolingType.LAST), start=1):
        engine.add(pooling_request(handle, kind))
        engine.run()
        computed[handle] = sum(step.get(handle, 0) for step in engine.scheduled)
    assert computed == {1: 20, 2: 20, 3: 20, 4: 4}
    assert engine.scheduler.stats().prefix_query_tokens == 20


def test_it_runs_beside_decodes_and_samples_nothing() -> None:
    engine = DrivenScheduler(max_num_batched_tokens=8)
    engine.add(make_request(1, 5, max_tokens=6), pooling_request(2, PoolingType.MEAN))
    assert engine.run() == {1: [100, 101, 102, 103, 104, 105], 2: []}


def test_a_prompt_may_fill_the_whole_context_and_the_whole_cache() -> None:
    engine = DrivenScheduler(num_blocks=6, block_size=4, max_model_len=20)
    engine.add(pooling_request(1, PoolingType.MEAN))
    while engine.scheduler.has_work:
        pooled = [output.pooled for output in engine.step().values()]
        if pooled:
            assert pooled == [bytes(range(20))]


def test_a_preempted_prompt_is_gathered_anew() -> None:
    engine = DrivenScheduler(num_blocks=10, block_size=4, max_num_batched_tokens=8, reserve_full_prompt=False)
    engine.add(make_request(1, 15, max_tokens=10), pooling_request(2, PoolingType.MEAN, [*PROMPT, *range(12)]))
    pooled = []
    while engine.scheduler.has_work:
        output = engine.step().get(2)
        pooled += [output.pooled] if output is not None and output.pooled else []
    assert engine.scheduler.stats().num_preemptions > 0
    assert pooled == [bytes(range(32))]
