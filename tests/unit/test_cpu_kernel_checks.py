"""What the CPU kernels refuse: wrong shapes and types always, wrong numbers in the tables in the debug build."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.kernels.cpu_kernels import CpuKernels
from engine_core.model_executor.kernels.cpu_library import load_operators
from fakes.kernel_cases import Batch, check_paged_attention, check_rope_and_cache
from skips import require_program

OPTIONS = AttentionOptions(0.2)
SEQUENCES = [(20, 1), (3, 4), (17, 1)]


@pytest.fixture(scope="module")
def release() -> CpuKernels:
    require_program("c++", "g++", "clang++", how="apt-get install g++")
    return CpuKernels(load_operators(lambda _: None), "portable")


@pytest.fixture(scope="module")
def debug() -> CpuKernels:
    require_program("c++", "g++", "clang++", how="apt-get install g++")
    return CpuKernels(load_operators(lambda _: None, is_debug=True), "portable")


@pytest.fixture
def batch() -> Batch:
    return Batch(SEQUENCES)


def attend(kernels: CpuKernels, batch: Batch, **changes: object) -> None:
    """With fields of the metadata in place of its own, and `query` or `out` in place of good ones."""
    query = changes.pop("query", batch.random(batch.num_tokens, 6, 16))
    out = changes.pop("out", torch.empty(batch.num_tokens, 6, 16))
    metadata = dataclasses.replace(batch.metadata, **changes)
    kernels.paged_attention(query, batch.cache, metadata, OPTIONS, out)


def changed(tensor: torch.Tensor, index: int | tuple[int, int], value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda b: {"out": torch.empty(b.num_tokens, 6, 15)},
        lambda b: {"out": torch.empty(b.num_tokens, 12, 16)[:, ::2]},
        lambda b: {"out": torch.empty(b.num_tokens, 6, 16, dtype=torch.bfloat16)},
        lambda b: {"query": b.random(b.num_tokens, 5, 16)},
        lambda b: {"query": b.random(b.num_tokens, 6, 8)},
        lambda b: {"query": b.random(b.num_tokens, 16, 6).transpose(1, 2)},
        lambda b: {"block_tables": b.metadata.block_tables.long()},
        lambda b: {"block_tables": b.metadata.block_tables[:2]},
        lambda b: {"seq_lens": b.metadata.seq_lens[:2]},
        lambda b: {"query_start_loc": b.metadata.query_start_loc[:-1]},
    ],
)
def test_attention_refuses_wrong_shapes_and_types(release, batch, make):
    with pytest.raises(RuntimeError):
        attend(release, batch, **make(batch))


def test_the_other_kernels_refuse_wrong_shapes_and_types(release, batch):
    rows, weight = torch.zeros(3, 8), torch.ones(8)
    with pytest.raises(RuntimeError, match="weight must be 8"):
        release.add_rms_norm(rows, None, torch.ones(7), 1e-5, rows)
    with pytest.raises(RuntimeError, match="out must be"):
        release.add_rms_norm(rows, None, weight, 1e-5, torch.zeros(2, 8))
    with pytest.raises(RuntimeError, match="float32 and bfloat16"):
        release.add_rms_norm(rows.half(), None, weight, 1e-5, rows.half())
    with pytest.raises(RuntimeError, match="gate_up must be"):
        release.act_mul(rows, "silu", torch.zeros(3, 3))
    qkv, cos, slots = batch.random(6, batch.heads.row_size), torch.zeros(6, 8), batch.metadata.slot_mapping
    for bad in (
        (qkv[:, 1:].contiguous(), cos, cos, slots),
        (qkv, torch.zeros(6, 9), torch.zeros(6, 9), slots),
        (qkv, cos, torch.zeros(6, 7), slots),
        (qkv, cos, cos, slots[:-1]),
        (qkv, cos, cos, slots.int()),
    ):
        with pytest.raises(RuntimeError):
            release.rope_and_cache(bad[0], bad[1], bad[2], batch.cache, bad[3], None)


def test_the_debug_build_computes_the_same(debug):
    check_paged_attention(debug, Batch(SEQUENCES), OPTIONS)
    check_rope_and_cache(debug, Batch(SEQUENCES), 8, has_qk_norm=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: {"block_tables": changed(m.block_tables, (1, 0), 1000)}, "block 1000 of sequence 1"),
        (lambda m: {"block_tables": changed(m.block_tables, (2, 1), -1)}, "block -1 of sequence 2"),
        (lambda m: {"seq_lens": changed(m.seq_lens, 0, 10_000)}, "sequence 0 needs 625 blocks"),
        (lambda m: {"seq_lens": changed(m.seq_lens, 1, 3)}, "sequence 1 has 4 tokens in this step, but only 3"),
        (lambda m: {"query_start_loc": changed(m.query_start_loc, 3, 7)}, "sequence 2 ends at token 7 of 6"),
        (lambda m: {"query_start_loc": changed(m.query_start_loc, 0, 1)}, "the first sequence starts at token 1"),
    ],
)
def test_the_debug_build_names_the_bad_number(debug, batch, make, message):
    with pytest.raises(RuntimeError, match=message):
        attend(debug, batch, **make(batch.metadata))


@pytest.mark.parametrize("slot", [-1, 10_000])
def test_the_debug_build_writes_to_no_slot_that_does_not_exist(debug, batch, slot):
    qkv, cos = batch.random(6, batch.heads.row_size), torch.zeros(6, 8)
    with pytest.raises(RuntimeError, match=f"slot {slot} of token 2"):
        debug.rope_and_cache(qkv, cos, cos, batch.cache, changed(batch.metadata.slot_mapping, 2, slot), None)
