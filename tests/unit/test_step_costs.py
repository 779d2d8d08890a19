"""Estimated costs of steps: numbers added up by hand, windows by brute force, and nothing unless asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from engine_core.metrics import EngineView, steps
from engine_core.model_executor.executor import ModelInfo, ModelWork
from engine_core.scheduler.pooling import PoolingParams, PoolingType
from engine_core.step_costs import StepCosts
from fakes.driven_scheduler import DrivenScheduler
from fakes.looped_engine import LoopedEngine
from fakes.request_factory import make_request

WORK = ModelWork(num_matrix_params=1000, num_head_params=50, attention_width=40, layer_bytes=4000, head_bytes=200)
ONE_GROUP = (KVCacheGroup(2),)


def make_costs(groups: tuple[KVCacheGroup, ...] = ONE_GROUP, *, work: ModelWork = WORK, **facts: bool) -> StepCosts:
    """24 bytes of KV for a token in the layers of a largest group."""
    sizes = {"vocab_size": 5, "max_position_embeddings": 99, "num_layers": 2, "kv_bytes_per_token": 24}
    info = ModelInfo(
        architecture="",
        dtype="",
        implementation="",
        weight_bytes=0,
        kv_cache_groups=groups,
        work=work,
        **sizes,
        **facts,
    )
    return StepCosts(info, num_workers=2)


def cost_of_step(engine: DrivenScheduler, costs: StepCosts) -> tuple[int, int, int]:
    """Make one; operations, and bytes read and written."""
    before = (costs.flops, costs.read_bytes, costs.write_bytes)
    step = engine.scheduler.schedule(engine.now)
    costs.count(step.num_scheduled_tokens, engine.scheduler.requests)
    engine.scheduler.update_from_output(step, engine.worker.execute(step), engine.now)
    after = (costs.flops, costs.read_bytes, costs.write_bytes)
    flops, read, written = (now - then for now, then in zip(after, before, strict=True))
    return flops, read, written


def test_a_chunk_the_end_of_a_prompt_and_a_decode_cost_what_they_compute_and_touch() -> None:
    engine, costs = DrivenScheduler(max_num_batched_tokens=8), make_costs()
    engine.add(make_request(1, 10))
    # 8 tokens see 1 + 2 + ... + 8 keys; nothing is sampled.
    assert cost_of_step(engine, costs) == (2 * 1000 * 8 + 2 * 40 * 36, 4000 + 24 * 8, 24 * 8)
    # 2 tokens see 9 and 10; one is sampled from.
    assert cost_of_step(engine, costs) == (2 * (1000 * 2 + 50) + 2 * 40 * 19, 4200 + 24 * 10, 24 * 2)
    assert cost_of_step(engine, costs) == (2 * (1000 + 50) + 2 * 40 * 11, 4200 + 24 * 11, 24)


def test_weights_are_read_once_a_step_however_many_requests_are_in_it() -> None:
    engine, costs = DrivenScheduler(), make_costs()
    engine.add(make_request(1, 3), make_request(2, 5))
    flops, read, written = cost_of_step(engine, costs)
    assert flops == 2 * (1000 * 8 + 50 * 2) + 2 * 40 * (6 + 15)
    assert (read, written) == (4200 + 24 * 8, 24 * 8)


def test_what_the_prefix_cache_has_is_read_and_not_computed() -> None:
    engine, costs = DrivenScheduler(), make_costs()
    engine.add(make_request(1, range(9), max_tokens=1))
    engine.run()
    engine.add(make_request(2, range(9)))
    assert cost_of_step(engine, costs) == (2 * (1000 + 50) + 2 * 40 * 9, 4200 + 24 * 9, 24)


def test_one_token_short_of_its_prompt_a_request_is_not_sampled_from() -> None:
    engine, costs = DrivenScheduler(max_num_batched_tokens=8), make_costs()
    engine.add(make_request(1, 9))
    assert cost_of_step(engine, costs)[1] == 4000 + 24 * 8


def test_a_vector_is_not_sampled() -> None:
    engine, costs = DrivenScheduler(), make_costs()
    engine.add(make_request(1, 4, max_tokens=0, pooling=PoolingParams(type=PoolingType.LAST)))
    assert cost_of_step(engine, costs) == (2 * 1000 * 4 + 2 * 40 * 10, 4000 + 24 * 4, 24 * 4)


def test_an_empty_step_costs_nothing() -> None:
    costs = make_costs()
    costs.count({}, {})
    assert (costs.flops, costs.read_bytes, costs.write_bytes) == (0, 0, 0)


def test_a_smaller_group_has_its_part_of_attention_and_of_the_cache() -> None:
    engine, costs = DrivenScheduler(windows=[None, 3], num_blocks=40), make_costs((KVCacheGroup(3), KVCacheGroup(1, 3)))
    engine.add(make_request(1, 5))
    # Of 2 x 40 operations for each key three quarters without a window, for 1 + ... + 5 keys, and a quarter with one,
    # for 1 + 2 + 3 * 3.
    attention = 60 * 15 + 20 * 12
    assert cost_of_step(engine, costs) == (2 * (5000 + 50) + attention, 4200 + (24 + 8) * 5, (24 + 8) * 5)
    # The window of the next token begins at position 3.
    assert cost_of_step(engine, costs)[1] == 4200 + 24 * 6 + 8 * 3


@given(window=st.none() | st.integers(1, 12), num_before=st.integers(0, 30), num_new=st.integers(1, 30))
def test_windows_bound_what_is_seen(window: int | None, num_before: int, num_new: int) -> None:
    """Against a count, key by key."""
    costs = make_costs((KVCacheGroup(1, window),), work=ModelWork(attention_width=1))
    request = make_request(1, num_before + num_new)
    request.num_computed_tokens = num_before + num_new
    costs.count({request.key: num_new}, {request.key: request})
    positions = range(num_before, num_before + num_new)
    seen = [{key for key in range(place + 1) if window is None or key > place - window} for place in positions]
    assert costs.flops == 2 * sum(map(len, seen))
    assert costs.read_bytes == 24 * len(set().union(*seen))


def test_where_all_tokens_see_each_other_all_keys_count_for_each() -> None:
    engine, costs = DrivenScheduler(), make_costs(is_causal=False)
    engine.add(make_request(1, 4))
    assert cost_of_step(engine, costs)[0] == 2 * (1000 * 4 + 50) + 2 * 40 * 16


def served(engine: LoopedEngine) -> dict[str, float]:
    view = EngineView("engine", engine.lifecycle, SimpleNamespace(), SimpleNamespace(), proc=engine.proc)
    families = [family for family in steps.collect(view) if "estimated" in family.name]
    return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.parametrize("is_async", [False, True])
def test_the_engine_estimates_on_demand_and_for_each_worker(is_async: bool) -> None:
    engine = LoopedEngine(mfu_metrics=True, async_scheduling=is_async)
    costs = engine.proc.core.step_costs
    assert costs is not None
    assert set(served(engine).values()) == {0}
    engine.add(1, num_prompt=6, max_tokens=3)
    engine.run()
    # The prompt and the first two of its tokens.
    assert costs.write_bytes == 8 * engine.executor.model_info.kv_bytes_per_token
    costs.num_workers = 4
    prefix = "stepwire_engine_core_estimated_"
    assert served(engine) == {
        f"{prefix}flops_total": costs.flops / 4,
        f"{prefix}read_bytes_total": costs.read_bytes / 4,
        f"{prefix}write_bytes_total": costs.write_bytes / 4,
    }
    assert LoopedEngine().proc.core.step_costs is None
    assert served(LoopedEngine()) == {}
