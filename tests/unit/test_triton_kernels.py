"""The Triton kernels in Triton's interpreter, on CPU tensors, against the torch reference over random shapes.

No GPU takes part: what the compiler makes of the kernels is not tested here, only that it takes them.
"""

# ruff: noqa: E402 (without triton nothing here can be imported)

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.model_executor.attention.core import AttentionOptions
from fakes.kernel_cases import (
    TOLERANCES,
    Batch,
    Heads,
    check_act_mul,
    check_add_rms_norm,
    check_paged_attention,
    check_rope_and_cache,
)

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")

import triton.language as tl

from engine_core.model_executor.kernels.triton_kernels import TritonKernels
from engine_core.model_executor.kernels.triton_linear import invariant_linear
from engine_core.model_executor.kernels.triton_tiles import key_offsets

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# So few that 4 of them share a batch of a few sequences, and that long contexts are cut.
NUM_PROCESSORS = 6
PLAIN = AttentionOptions(scale=0.25)
# A window that is no multiple of anything.
ALL_OPTIONS = AttentionOptions(scale=0.2, sliding_window=37, softcap=3.0)
# Decodes beside a chunk and whole prompts; an empty past, a full block, a context that is cut.
MIXED = [(40, 1), (0, 7), (31, 34), (0, 1), (600, 1), (15, 1)]


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(NUM_PROCESSORS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [PLAIN, ALL_OPTIONS], ids=["plain", "window and softcap"])
def test_attention_of_a_mixed_batch(kernels: TritonKernels, dtype: torch.dtype, options: AttentionOptions):
    check_paged_attention(kernels, Batch(MIXED, dtype=dtype), options)


@pytest.mark.parametrize(
    "heads",
    [Heads(2, 2, 64), Heads(3, 1, 80), Heads(8, 1, 128), Heads(10, 2, 24), Heads(2, 1, 256)],
    ids=lambda heads: f"{heads.num_heads}x{heads.num_kv_heads}x{heads.head_dim}",
)
@pytest.mark.parametrize("block_size", [4, 16])
def test_attention_of_any_heads_and_blocks(kernels: TritonKernels, heads: Heads, block_size: int):
    batch = Batch([(70, 1), (9, 21)], heads, block_size=block_size, seed=heads.head_dim)
    check_paged_attention(kernels, batch, AttentionOptions(scale=heads.head_dim**-0.5, sliding_window=50))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_attention_of_any_batch(data: st.DataObject):
    """(past, new) tokens of each sequence, any heads, and whatever a layer may ask of attention."""
    sequence = st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 2, 5, 17, 40]))
    num_kv_heads = data.draw(st.integers(1, 3))
    heads = Heads(
        num_kv_heads * data.draw(st.integers(1, 4)), num_kv_heads, data.draw(st.sampled_from([8, 24, 64, 80]))
    )
    batch = Batch(
        data.draw(st.lists(sequence, min_size=1, max_size=4)),
        heads,
        dtype=data.draw(st.sampled_from(DTYPES)),
        block_size=data.draw(st.sampled_from([4, 16])),
        seed=data.draw(st.integers(0, 99)),
    )
    window, softcap = data.draw(st.none() | st.integers(1, 90)), data.draw(st.none() | st.just(3.0))
    options = AttentionOptions(scale=heads.head_dim**-0.5, sliding_window=window, softcap=softcap)
    check_paged_attention(TritonKernels(NUM_PROCESSORS), batch, options)


@pytest.mark.parametrize("seq_len", [255, 256, 257, 513, 1100])
def test_parts_of_a_long_context_join(kernels: TritonKernels, seq_len: int):
    """Also beside a sequence so short that most of its parts are empty, and where a window leaves the first parts."""
    check_paged_attention(kernels, Batch([(seq_len - 1, 1), (2, 1)], seed=seq_len), PLAIN)
    windowed = AttentionOptions(scale=0.25, sliding_window=300)
    check_paged_attention(kernels, Batch([(seq_len - 1, 1), (2, 1)], seed=seq_len), windowed)


def test_a_prompt_of_several_tiles(kernels: TritonKernels):
    check_paged_attention(kernels, Batch([(0, 75), (0, 64), (100, 65)]), AttentionOptions(scale=0.25))
    check_paged_attention(kernels, Batch([(0, 75), (100, 65)]), AttentionOptions(scale=0.25, sliding_window=20))


def test_a_sequence_sees_nothing_of_what_others_left_in_its_blocks(kernels: TritonKernels):
    batch = Batch([(20, 1), (3, 9)])
    expected = _attention(kernels, batch, PLAIN)
    # Slots behind the ends of both, in blocks that they own, and the null block, which fills the tables.
    for row, seq_len in enumerate([21, 12]):
        last = int(batch.metadata.block_tables[row, seq_len // 16])
        batch.cache.keys[last, :, seq_len % 16 :] = 1e4
        batch.cache.values[last, :, seq_len % 16 :] = 1e4
    batch.cache.keys[0], batch.cache.values[0] = 1e4, 1e4
    torch.testing.assert_close(_attention(kernels, batch, PLAIN), expected, rtol=0, atol=0)


@triton.jit
def _two_offsets(table, out, block_stride):
    keys = tl.arange(0, 2)
    tl.store(out + keys, key_offsets(table, 1, keys, keys < 2, block_stride, 3, 1, 16))


def test_the_cache_may_hold_more_elements_than_an_int32_counts():
    block_stride, block = 2**29, 5
    found = torch.zeros(2, dtype=torch.int64)
    _two_offsets[(1,)](torch.tensor([0, block], dtype=torch.int32), found, block_stride)
    assert found.tolist() == [3, block * block_stride + 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_half"), [(16, 8), (80, 16), (24, 0), (64, 32)])
@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_rope_and_cache(kernels: TritonKernels, dtype: torch.dtype, head_dim: int, rotary_half: int, has_qk_norm: bool):
    batch = Batch([(3, 1), (14, 5)], Heads(3, 1, head_dim), dtype=dtype)
    check_rope_and_cache(kernels, batch, rotary_half, has_qk_norm=has_qk_norm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_features", [16, 100, 576])
@pytest.mark.parametrize("has_x", [False, True])
def test_add_rms_norm(kernels: TritonKernels, dtype: torch.dtype, num_features: int, has_x: bool):
    check_add_rms_norm(kernels, Batch([(0, 5)], dtype=dtype), num_features, has_x=has_x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_act_mul(kernels: TritonKernels, dtype: torch.dtype, activation):
    check_act_mul(kernels, Batch([(0, 3)], dtype=dtype), 1100, activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_invariant_linear(dtype: torch.dtype, has_bias: bool):
    batch = Batch([(0, 70)], dtype=dtype)
    x, weight = batch.random(70, 72), batch.random(130, 72) / 8
    bias = batch.random(130) if has_bias else None
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(
        invariant_linear(x, weight, bias).float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


def test_the_compiler_takes_every_kernel(tmp_path: Path):
    """Down to machine code of an H100, which needs no GPU; in a process of its own, without the interpreter."""
    script = Path(__file__).parent.parent / "fakes" / "compiled_kernels.py"
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    result = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]


def _attention(kernels: TritonKernels, batch: Batch, options: AttentionOptions) -> torch.Tensor:
    heads = batch.heads
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch.num_tokens, heads.num_heads, heads.head_dim, generator=generator).to(batch.dtype)
    out = torch.empty_like(query)
    kernels.paged_attention(query, batch.cache, batch.metadata, options, out)
    return out
