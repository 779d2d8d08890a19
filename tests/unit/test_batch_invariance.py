"""--batch-invariant: a sequence's logits are the same to the last bit, whatever else is in the batch.

In Triton's interpreter, where the order of sums within a tile is NumPy's. That a GPU's is fixed as well follows from
the fixed tiles, and was not tested on one.
"""

from __future__ import annotations

import pytest
import torch

from engine_core.model_executor.attention.core import AttentionOptions
from fakes.decode_steps import eager, native_decoder, random_caches, step_of
from fakes.kernel_cases import Batch, Heads
from fakes.tiny_models import save_tiny_model, tiny_configs

pytest.importorskip("triton", reason="needs triton: pip install triton")

from engine_core.model_executor.kernels.triton_kernels import TritonKernels
from engine_core.model_executor.kernels.triton_linear import invariant_linear

OPTIONS = AttentionOptions(scale=0.25, sliding_window=200, softcap=4.0)
# So few that a context of 600 is cut where it may be.
NUM_PROCESSORS = 4


def attention_of(kernels: TritonKernels, batch: Batch, query: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(query)
    kernels.paged_attention(query, batch.cache, batch.metadata, OPTIONS, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_a_decode_is_that_of_the_same_token_in_a_chunk(dtype: torch.dtype):
    """So a request that is preempted and computed again as a prompt comes to the same tokens."""
    kernels = TritonKernels(NUM_PROCESSORS, is_batch_invariant=True)
    heads = Heads(6, 2, 16)
    # The same cache: one sequence, whose last tokens are computed at once, or only the last of them.
    chunk, decode = (Batch([(600 - count, count)], heads, dtype=dtype) for count in (7, 1))
    query = chunk.random(7, heads.num_heads, heads.head_dim)
    of_chunk = attention_of(kernels, chunk, query)
    assert torch.equal(attention_of(kernels, decode, query[-1:]), of_chunk[-1:])


def test_attention_does_not_depend_on_the_neighbours():
    kernels = TritonKernels(NUM_PROCESSORS, is_batch_invariant=True)
    heads = Heads(6, 2, 16)
    alone = Batch([(400, 1)], heads)
    query = alone.random(1, heads.num_heads, heads.head_dim)
    expected = attention_of(kernels, alone, query)
    crowded = Batch([(3, 1), (400, 1), (10, 20)], heads)
    # The same keys and values, in other blocks.
    source, target = alone.metadata.block_tables[0, :26].long(), crowded.metadata.block_tables[1, :26].long()
    crowded.cache.keys[target] = alone.cache.keys[source]
    crowded.cache.values[target] = alone.cache.values[source]
    queries = crowded.random(22, heads.num_heads, heads.head_dim)
    queries[1] = query[0]
    assert torch.equal(attention_of(kernels, crowded, queries)[1], expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_do_not_depend_on_the_number_of_rows(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 200, generator=generator).to(dtype) for size in (130, 140))
    whole = invariant_linear(x, weight)
    for first, last in ((0, 1), (5, 6), (64, 130), (100, 117)):
        assert torch.equal(invariant_linear(x[first:last].contiguous(), weight), whole[first:last])


@pytest.mark.filterwarnings("ignore:overflow")
def test_logits_of_a_whole_model_do_not_depend_on_the_batch(tmp_path):
    config = tiny_configs()["llama"]
    config.num_hidden_layers = 2
    kernels = TritonKernels(NUM_PROCESSORS, is_batch_invariant=True)
    backend = native_decoder(save_tiny_model(tmp_path, config), kernels, invariant_linear)

    def logits_of(sequences: list[tuple[int, int, int]]) -> torch.Tensor:
        return eager(backend, step_of(sequences), random_caches(backend, 20), kernels)

    alone, crowded = logits_of([(1, 9, 1)]), logits_of([(0, 3, 1), (1, 9, 1), (2, 0, 5)])
    assert torch.equal(crowded[1], alone[0])
