"""The compiled CPU kernels against the torch reference, for every instruction set that this machine has."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.kernels.cpu_kernels import CpuKernels
from engine_core.model_executor.kernels.cpu_library import available_sets, load_operators
from fakes.kernel_cases import (
    Batch,
    Heads,
    check_act_mul,
    check_add_rms_norm,
    check_paged_attention,
    check_rope_and_cache,
)
from skips import require_program

DTYPES = (torch.float32, torch.bfloat16)
# Groups from 1 to 20; sizes that are multiples of every vector, of some, and of none.
HEADS = (
    Heads(9, 3, 64),
    Heads(4, 4, 16),
    Heads(8, 1, 80),
    Heads(8, 2, 128),
    Heads(2, 1, 256),
    Heads(16, 2, 64),
    Heads(20, 1, 32),
    Heads(3, 1, 36),
    Heads(5, 1, 7),
)
DECODES = [(300, 1), (17, 1), (128, 1), (0, 1)]
MIXED = [(0, 200), (33, 40), (250, 1), (3, 1), (0, 2), (511, 1), (130, 7)]
OPTIONS = (
    AttentionOptions(0.3),
    AttentionOptions(0.2, sliding_window=24),
    AttentionOptions(0.5, softcap=5.0),
    AttentionOptions(0.1, sliding_window=150, softcap=2.0),
)


def all_sets() -> list[CpuKernels]:
    require_program("c++", "g++", "clang++", how="apt-get install g++")
    operators = load_operators(lambda _: None)
    return [CpuKernels(operators, name) for name in available_sets(operators)]


@pytest.fixture(scope="module")
def kernel_sets() -> list[CpuKernels]:
    return all_sets()


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_over_mixed_batches(kernel_sets, heads, dtype):
    for kernels in kernel_sets:
        for block_size, sequences in ((16, DECODES), (16, MIXED), (4, MIXED), (3, [(70, 1), (20, 30)])):
            batch = Batch(sequences, heads, dtype=dtype, block_size=block_size)
            for options in OPTIONS:
                check_paged_attention(kernels, batch, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sequences", [[(4095, 1)], [(1500, 1), (40, 1), (2200, 1)], [(300, 1)] * 7, [(0, 300), (900, 1)]], ids=str
)
def test_long_contexts_are_shared_by_several_threads(kernel_sets, four_threads, sequences, dtype):
    """One kv head: fewer sequences than threads, so that they are cut along their context and merged."""
    for kernels, num_heads in itertools.product(kernel_sets, (4, 6)):
        batch = Batch(sequences, Heads(num_heads, 1, 64), dtype=dtype)
        for options in (AttentionOptions(0.125), AttentionOptions(0.125, sliding_window=1000)):
            check_paged_attention(kernels, batch, options)


@settings(max_examples=25, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 70) | st.just(1)), min_size=1, max_size=6),
    group=st.integers(1, 9),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 140),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.floats(1, 30),
    dtype=st.sampled_from(DTYPES),
)
def test_attention_of_random_shapes(sequences, group, num_kv_heads, head_dim, block_size, window, softcap, dtype):
    batch = Batch(sequences, Heads(group * num_kv_heads, num_kv_heads, head_dim), dtype=dtype, block_size=block_size)
    for kernels in all_sets():
        check_paged_attention(kernels, batch, AttentionOptions(head_dim**-0.5, window, softcap))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_half"), [(64, 32), (80, 20), (16, 0), (36, 13)])
@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_rope_and_cache(kernel_sets, head_dim, rotary_half, has_qk_norm, dtype):
    for kernels in kernel_sets:
        for block_size in (4, 16):
            batch = Batch(MIXED, Heads(6, 2, head_dim), dtype=dtype, block_size=block_size)
            check_rope_and_cache(kernels, batch, rotary_half, has_qk_norm=has_qk_norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_features", [1, 16, 100, 576])
@pytest.mark.parametrize("has_x", [False, True])
def test_add_rms_norm(kernel_sets, num_features, has_x, dtype):
    for kernels in kernel_sets:
        for num_tokens in (1, 70):
            check_add_rms_norm(kernels, Batch([(0, num_tokens)], dtype=dtype), num_features, has_x=has_x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_act_mul(kernel_sets, activation, dtype):
    for kernels in kernel_sets:
        for num_features in (1, 64, 100, 1536):
            check_act_mul(kernels, Batch([(0, 40)], dtype=dtype), num_features, activation)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_of_extreme_numbers(kernel_sets, activation):
    gate = torch.tensor([[-1e4, -200.0, -90.0, -1e-6, 0.0, 1e-6, 90.0, 200.0, 1e4, float("inf"), float("nan")]])
    for kernels in kernel_sets:
        out = torch.empty_like(gate)
        kernels.act_mul(torch.cat([gate, torch.ones_like(gate)], dim=1), activation, out)
        # What a large negative number leaves is 0, as far as 1e-4 shows.
        torch.testing.assert_close(out[0, :3], torch.zeros(3), atol=1e-4, rtol=0)
        torch.testing.assert_close(out[0, 3:9], gate[0, 3:9].clamp(min=-5e-7), atol=1e-6, rtol=0)
        assert out[0, 9] == float("inf")
        assert out[0, 10].isnan()


def test_operators_are_good_citizens_of_torch(kernel_sets):
    """Schemas tell what is written; fake kernels exist; nothing breaks under tracing."""
    operators, batch = torch.ops.stepwire, Batch([(3, 2), (20, 1)])
    cache, metadata = batch.cache, batch.metadata
    qkv, cos = batch.random(3, batch.heads.row_size), torch.rand(3, 8)
    query, number = batch.random(3, 6, 16), kernel_sets[0]._set
    tables = (metadata.block_tables, metadata.seq_lens, metadata.query_start_loc)
    rows, weight = batch.random(3, 20), batch.weight(20)
    calls = {
        operators.add_rms_norm: (rows, rows.clone(), weight, 1e-5, torch.empty_like(rows), number),
        operators.act_mul: (rows, 0, batch.random(3, 10), number),
        operators.rope_and_cache: (
            *(qkv, cos, cos.clone(), cache.keys, cache.values, metadata.slot_mapping),
            *(None, None, 0.0, number),
        ),
        operators.paged_attention: (
            *(query, cache.keys, cache.values, *tables),
            *(0.2, 0, 0.0, torch.empty_like(query), number),
        ),
    }
    for operator, arguments in calls.items():
        torch.library.opcheck(operator.default, arguments)
