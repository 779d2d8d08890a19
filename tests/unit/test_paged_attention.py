"""Paged attention against plain attention over each whole sequence, whatever way the tokens were computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache, LayerSpec
from engine_core.model_executor.attention.metadata import build_attention_metadata
from engine_core.model_executor.attention.paged_attention import PagedAttention

CPU = torch.device("cpu")


# Tokens of each sequence that see each other in a layer that is not causal.
NUM_PROMPT = 6


@dataclass
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    block_size: int = 4


def reference(query, key, value, options: AttentionOptions) -> torch.Tensor:
    """One token at a time, one head at a time: [L, H, D], [L, K, D], [L, K, V] -> [L, H, V]."""
    output = torch.empty(*query.shape[:2], value.shape[2])
    for position in range(query.shape[0]):
        last = position if options.is_causal else max(position, NUM_PROMPT - 1)
        first = 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)
        for head in range(query.shape[1]):
            kv_head = head * key.shape[1] // query.shape[1]
            scores = key[first : last + 1, kv_head] @ query[position, head] * options.scale
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks[head : head + 1]])
            weights = scores.softmax(dim=0)[: last + 1 - first]
            output[position, head] = weights @ value[first : last + 1, kv_head]
    return output


class Sequences:
    """Random sequences with blocks in shuffled order, run through paged attention in chosen steps."""

    def __init__(self, lengths: list[int], shape: Shape, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.query, self.key, self.value = [], [], []
        for length in lengths:
            self.query.append(torch.randn(length, shape.num_heads, shape.key_dim, generator=generator))
            self.key.append(torch.randn(length, shape.num_kv_heads, shape.key_dim, generator=generator))
            self.value.append(torch.randn(length, shape.num_kv_heads, shape.value_dim, generator=generator))
        num_blocks = [-(-length // shape.block_size) for length in lengths]
        shuffled = (torch.randperm(sum(num_blocks), generator=generator) + 1).numpy()
        self.tables = np.split(shuffled, np.cumsum(num_blocks)[:-1])
        spec = LayerSpec(shape.num_kv_heads, shape.key_dim, shape.value_dim)
        self.cache = LayerKVCache(spec, sum(num_blocks) + 1, shape.block_size, torch.float32, CPU)
        self.computed = [0] * len(lengths)
        self.outputs = [torch.empty(0, shape.num_heads, shape.value_dim) for _ in lengths]

    def step(self, counts: dict[int, int], options: AttentionOptions) -> None:
        """Compute that many further tokens of each of these sequences, in one batch."""
        block_size = self.shape.block_size
        spans = {i: slice(self.computed[i], self.computed[i] + count) for i, count in counts.items()}
        tables = np.zeros((len(counts), max(len(table) for table in self.tables)), dtype=np.int64)
        for row, i in enumerate(counts):
            tables[row, : len(self.tables[i])] = self.tables[i]
        positions = {i: np.arange(span.start, span.stop) for i, span in spans.items()}
        metadata = build_attention_metadata(
            query_start_loc=np.cumsum([0, *counts.values()]),
            seq_lens=np.array([span.stop for span in spans.values()]),
            prompt_lens=np.array([NUM_PROMPT] * len(counts)),
            block_tables=tables,
            slot_mapping=np.concatenate(
                [self.tables[i][p // block_size] * block_size + p % block_size for i, p in positions.items()]
            ),
            block_size=block_size,
            device=CPU,
        )
        batch = [torch.cat([tensors[i][spans[i]] for i in counts]) for tensors in (self.query, self.key, self.value)]
        output = PagedAttention({0: self.cache}, {0: metadata}).attend(0, *batch, options)
        for i, part in zip(counts, output.split(list(counts.values())), strict=True):
            self.outputs[i] = torch.cat([self.outputs[i], part])
            self.computed[i] += counts[i]

    def check(self, options: AttentionOptions) -> None:
        for i, output in enumerate(self.outputs):
            expected = reference(self.query[i], self.key[i], self.value[i], options)[: self.computed[i]]
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


OPTIONS = {
    "plain": AttentionOptions(scale=0.35),
    "sliding window": AttentionOptions(scale=0.35, sliding_window=5),
    "softcap": AttentionOptions(scale=2.0, softcap=3.0),
    "softcap and window": AttentionOptions(scale=2.0, softcap=3.0, sliding_window=3),
    "sinks": AttentionOptions(scale=0.35, sinks=torch.tensor([0.0, 2.0, -1.0, 5.0])),
}
every_kind = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@every_kind
@pytest.mark.parametrize("length", [1, 4, 13])
def test_prefill(options, length):
    sequences = Sequences([length], Shape())
    sequences.step({0: length}, options)
    sequences.check(options)


@every_kind
def test_chunks_then_decodes(options):
    sequences = Sequences([23], Shape())
    for count in (6, 1, 8, 3, 1, 1, 1, 2):
        sequences.step({0: count}, options)
    sequences.check(options)


@every_kind
def test_mixed_batch(options):
    sequences = Sequences([9, 17, 30, 5], Shape())
    sequences.step({1: 10, 2: 20}, options)
    # A decode, a chunk, another decode far longer than the first, and a fresh prompt.
    sequences.step({0: 1, 1: 7, 2: 1, 3: 5}, options)
    sequences.step({2: 1, 0: 1}, options)
    sequences.check(options)


@pytest.mark.parametrize(
    "shape", [Shape(4, 4), Shape(4, 1), Shape(6, 3, key_dim=12, value_dim=4), Shape(block_size=16)]
)
def test_head_layouts(shape):
    sequences = Sequences([11, 19], shape)
    options = AttentionOptions(scale=0.3)
    sequences.step({0: 11, 1: 7}, options)
    sequences.step({1: 1}, options)
    sequences.step({1: 11}, options)
    sequences.check(options)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_schedule(data):
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    window = data.draw(st.one_of(st.none(), st.integers(1, 9)))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    options = AttentionOptions(scale=0.4, sliding_window=window, softcap=softcap)
    sequences = Sequences(lengths, Shape(), seed=data.draw(st.integers(0, 100)))
    while any(done < length for done, length in zip(sequences.computed, lengths, strict=True)):
        left = {i: length - sequences.computed[i] for i, length in enumerate(lengths) if sequences.computed[i] < length}
        chosen = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        sequences.step({i: data.draw(st.integers(1, left[i])) for i in chosen}, options)
    sequences.check(options)


def test_a_shared_prefix_is_read_and_not_computed_again():
    options = AttentionOptions(scale=0.35)
    sequences = Sequences([8, 14], Shape())
    for tensors in (sequences.query, sequences.key, sequences.value):
        tensors[1][:8] = tensors[0]
    sequences.step({0: 8}, options)
    sequences.tables[1][:2] = sequences.tables[0]
    sequences.computed[1], sequences.outputs[1] = 8, sequences.outputs[0]
    sequences.step({1: 6}, options)
    sequences.check(options)


@pytest.mark.parametrize("name", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("steps", [[NUM_PROMPT, 1, 1, 1], [NUM_PROMPT + 3], [NUM_PROMPT + 2, 1]], ids=str)
def test_tokens_of_a_prompt_see_each_other_and_no_output(name, steps):
    """Also where a prompt is computed again together with its output, after a preemption."""
    options = replace(OPTIONS[name], is_causal=False)
    sequences = Sequences([NUM_PROMPT + 3], Shape())
    for count in steps:
        sequences.step({0: count}, options)
    sequences.check(options)


def test_what_another_request_left_in_a_block_has_no_effect():
    options = AttentionOptions(scale=0.35)
    sequences = Sequences([6, 30], Shape())
    ruined = torch.full((4, 2, 8), float("nan"))
    ruined[1] = float("inf")
    for block in [0, *sequences.tables[0]]:
        sequences.cache.write(ruined, -ruined, torch.arange(4) + int(block) * 4)
    sequences.step({0: 5, 1: 29}, options)
    # The first is padded to the blocks of the second, and its last block is half its own.
    sequences.step({0: 1, 1: 1}, options)
    sequences.check(options)


def test_queries_are_attended_in_rounds_when_scores_are_explicit():
    options = AttentionOptions(scale=0.5, softcap=4.0)
    sequences = Sequences([300], Shape(num_heads=1, num_kv_heads=1, key_dim=2, value_dim=2))
    sequences.step({0: 300}, options)
    sequences.check(options)
