"""A decoder in one call: to the last bit what the loop over single operations computes with the same kernels."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata, build_attention_metadata
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.kernels.cpu_kernels import CpuKernels
from engine_core.model_executor.kernels.cpu_library import available_sets, load_operators
from engine_core.model_executor.loader import load_model
from engine_core.model_executor.models.choice import choose_backend
from engine_core.model_executor.models.decoder import NativeDecoder
from fakes.tiny_models import save_tiny_model, tiny_configs
from skips import require_program

pytestmark = pytest.mark.instructions

BLOCK_SIZE = 16
# Norms of queries and keys; biases; norms after a branch, two groups of layers, soft caps; layers without rotation, and
# rotations that are scaled; a scaled embedding; heads that are the embedding's table, and others.
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "smollm3", "phi3_partial_rope", "yarn_rope")
# (tokens before, tokens of this step) of each sequence.
DECODES = [(0, 1), (17, 1), (40, 1), (5, 1)]
ONE_LONG = [(90, 1)]
MIXED = [(3, 9), (20, 1), (0, 20), (33, 1), (16, 2)]


def kernels_of(name: str, *, is_debug: bool = False) -> CpuKernels:
    require_program("c++", "g++", "clang++", how="apt-get install g++")
    operators = load_operators(lambda _: None, is_debug=is_debug)
    if name not in available_sets(operators):
        pytest.skip(f"needs a CPU with {name}")
    return CpuKernels(operators, name)


# The other sets have no products of their own.
@pytest.fixture(scope="module", params=["amx", "avx512"])
def kernels(request) -> CpuKernels:
    return kernels_of(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of them is restored."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("fused")
    return {name: save_tiny_model(root / name, tiny_configs()[name]) for name in FAMILIES}


def decoder_of(directory, kernels: CpuKernels, dtype: str = "bfloat16", quantization: str = "none") -> NativeDecoder:
    settings = EngineSettings(model="m", device="cpu", dtype=dtype, model_impl="native", quantization=quantization)
    backend = choose_backend(settings, load_model(settings, directory, lambda _: None), kernels, None)
    assert isinstance(backend, NativeDecoder)
    return backend


class Batch:
    """One step of some sequences, over caches whose earlier tokens are random."""

    def __init__(self, decoder: NativeDecoder, sequences: list[tuple[int, int]]) -> None:
        before, query_lens = (np.array(column) for column in zip(*sequences, strict=True))
        seq_lens, starts = before + query_lens, np.concatenate([[0], np.cumsum(query_lens)])
        num_blocks = -(-seq_lens // BLOCK_SIZE)
        tables = np.zeros((len(sequences), num_blocks.max()), dtype=np.int64)
        for row, count in enumerate(num_blocks):
            tables[row, :count] = 1 + num_blocks[:row].sum() + np.arange(count)
        positions = np.concatenate([np.arange(b, b + q) for b, q in sequences])
        rows = np.repeat(np.arange(len(sequences)), query_lens)
        self.decoder = decoder
        self.dtype = decoder._loaded.dtype
        self.positions = torch.from_numpy(positions)
        self.last = torch.from_numpy(starts[1:] - 1)
        self.ids = torch.randint(3, 60, (len(positions),), generator=torch.Generator().manual_seed(1))
        self.num_blocks = 1 + int(num_blocks.sum())
        self.metadata: AttentionMetadata = build_attention_metadata(
            query_start_loc=starts,
            seq_lens=seq_lens,
            prompt_lens=seq_lens,
            block_tables=tables,
            slot_mapping=tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            device=torch.device("cpu"),
        )

    def caches(self) -> dict[int, LayerKVCache]:
        generator = torch.Generator().manual_seed(2)
        caches = {}
        for index, spec in self.decoder.layer_specs.items():
            cache = LayerKVCache(spec, self.num_blocks, BLOCK_SIZE, self.dtype, torch.device("cpu"))
            for tensor in (cache.keys, cache.values):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            caches[index] = cache
        return caches

    def of_logits(self, indices: list[int]) -> Batch:
        """Logits of these tokens instead of each sequence's last one."""
        self.last = torch.tensor(indices, dtype=torch.int64)
        return self

    @torch.inference_mode()
    def run(self, caches: dict[int, LayerKVCache], metadata: AttentionMetadata | None = None) -> torch.Tensor:
        context = PagedAttention(caches, dict.fromkeys(caches, metadata or self.metadata))
        return self.decoder.forward(self.ids, self.positions, self.last, context)

    def results(self) -> list[torch.Tensor]:
        """Logits, hidden states, and what is in the caches."""
        caches = self.caches()
        logits = self.run(caches)
        tensors = [tensor for cache in caches.values() for tensor in (cache.keys, cache.values)]
        return [logits, self.decoder.hidden_states(), *tensors]


def assert_same(decoder: NativeDecoder, batch: Batch) -> None:
    """With and without the one call; what is written into the cache too."""
    for one, other in zip(*both_ways(decoder, batch), strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


def both_ways(decoder: NativeDecoder, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    assert decoder._fused is not None
    assert len(batch.ids) <= decoder._fused.max_tokens
    fused, found = decoder._fused, batch.results()
    decoder._fused = None
    try:
        return found, batch.results()
    finally:
        decoder._fused = fused


def packed_anew(decoder: NativeDecoder) -> NativeDecoder:
    decoder.unpack()
    decoder.pack()
    return decoder


@pytest.mark.parametrize("sequences", [DECODES, ONE_LONG], ids=["decodes", "one long"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(directories, kernels, family, dtype, sequences):
    decoder = decoder_of(directories[family], kernels, dtype)
    assert_same(decoder, Batch(decoder, sequences))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_beside_decodes(directories, kernels, family, dtype):
    decoder = decoder_of(directories[family], kernels, dtype)
    assert_same(decoder, Batch(decoder, MIXED))


@pytest.mark.parametrize("sequences", [DECODES, ONE_LONG, MIXED], ids=["decodes", "one long", "mixed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_weights_of_int8(directories, kernels, family, dtype, sequences):
    decoder = decoder_of(directories[family], kernels, dtype, "int8")
    batch = Batch(decoder, sequences)
    assert decoder._fused is not None
    # Its limit is about products of other weights.
    decoder._fused.max_tokens = len(batch.ids)
    assert_same(decoder, batch)


@pytest.mark.parametrize("indices", [[], [3], [5, 0, 5, 5, 12], list(range(33))], ids=len)
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_of_any_tokens_in_any_order(directories, kernels, family, quantization, indices):
    decoder = decoder_of(directories[family], kernels, quantization=quantization)
    batch = Batch(decoder, MIXED).of_logits(indices)
    assert_same(decoder, batch)
    assert batch.results()[0].shape == (len(indices), decoder.vocab_size)


def test_logits_of_so_many_tokens_that_another_product_is_faster(directories, kernels):
    decoder = decoder_of(directories["llama"], kernels)
    num_rows = kernels.few_rows.max_rows(torch.bfloat16) + 1
    assert_same(decoder, Batch(decoder, DECODES).of_logits([index % 4 for index in range(num_rows)]))


def test_a_head_of_another_form_is_multiplied_behind_the_call(directories, kernels, monkeypatch):
    decoder, read = decoder_of(directories["qwen2"], kernels), kernels.few_rows.read

    def read_others(packed, weight, bias):
        return None if len(weight) == decoder.vocab_size else read(packed, weight, bias)

    monkeypatch.setattr(kernels.few_rows, "read", read_others)
    assert packed_anew(decoder)._lm_head.panels is None
    assert_same(decoder, Batch(decoder, DECODES))


class DoubledEmbedding(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


class OwnEmbedding(torch.nn.Module):
    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(table)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


def test_an_embedding_of_another_kind_takes_the_other_way(directories, kernels):
    decoder = decoder_of(directories["qwen2"], kernels)
    batch = Batch(decoder, DECODES)
    before, table = batch.results()[0], decoder._module.model.embed_tokens.weight.data
    for embedding, is_same in (
        (DoubledEmbedding.from_pretrained(table), False),
        (torch.nn.Embedding.from_pretrained(table.clone(), max_norm=0.1), False),
        (OwnEmbedding(table), True),
    ):
        decoder._module.model.embed_tokens = embedding
        assert packed_anew(decoder)._fused is None
        assert torch.equal(batch.results()[0], before) == is_same


def test_rotations_of_later_positions_than_before(directories, kernels):
    for family in ("gemma3", "yarn_rope"):
        decoder = decoder_of(directories[family], kernels)
        for before in (3, 1022, 1024, 5000, 40):
            assert_same(decoder, Batch(decoder, [(before, 3), (7, 1)]))


@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_any_number_of_threads(directories, kernels, threads, num_threads):
    """More than there are cores too: those who wait let the others work."""
    decoder = decoder_of(directories["gemma2"], kernels)
    torch.set_num_threads(num_threads)
    for sequences in (DECODES, ONE_LONG):
        assert_same(decoder, Batch(decoder, sequences))


def test_a_long_prompt(directories, kernels):
    """Rows of a product are taken in blocks; where the loop uses oneDNN for so many, that adds up in another order."""
    decoder = decoder_of(directories["llama"], kernels)
    for sequences in ([(0, 120), (7, 110), (0, 90)], [(0, 700), (7, 600)]):
        if sum(query_len for _, query_len in sequences) > decoder._fused.max_tokens:  # type: ignore[union-attr]
            continue
        batch = Batch(decoder, sequences)
        for one, other in zip(*both_ways(decoder, batch), strict=True):
            assert float((one.float() - other.float()).norm()) <= 0.02 * float(other.float().norm())


def test_caches_in_turn_of_which_the_other_one_goes(directories, kernels):
    decoder = decoder_of(directories["llama"], kernels)
    batch = Batch(decoder, DECODES)
    expected = batch.run(batch.caches())
    first, second = batch.caches(), batch.caches()
    batch.run(first)
    assert torch.equal(batch.run(second), expected)
    del first
    assert torch.equal(batch.run(second), expected)


def test_more_tokens_than_it_is_meant_for_take_the_other_way(directories, kernels):
    decoder = decoder_of(directories["llama"], kernels)
    assert decoder._fused is not None
    batch = Batch(decoder, DECODES)
    expected = batch.results()[0]
    decoder._fused.max_tokens = len(batch.ids) - 1
    decoder._fused.run = None  # type: ignore[method-assign, assignment]  # it would be called
    assert torch.equal(batch.results()[0], expected)


def test_new_weights_are_seen(directories, kernels):
    decoder = decoder_of(directories["llama"], kernels)
    batch = Batch(decoder, DECODES)
    before = batch.results()[0]
    decoder.unpack()
    assert decoder._fused is None
    decoder._module.base_model.layers[1].mlp.down_proj.weight.data.mul_(3.0)
    decoder.pack()
    assert_same(decoder, batch)
    assert not torch.equal(batch.results()[0], before)


def test_tensors_that_do_not_fit_are_refused(directories, kernels):
    decoder = decoder_of(directories["llama"], kernels)
    batch, metadata = Batch(decoder, DECODES), Batch(decoder, DECODES).metadata
    caches = batch.caches()
    for wrong, message in [
        (replace(metadata, slot_mapping=metadata.slot_mapping[:-1].contiguous()), "slots must be 4"),
        (replace(metadata, block_tables=metadata.block_tables.long()), "block_tables must be int32 rows"),
        (replace(metadata, seq_lens=metadata.seq_lens[:-1].contiguous()), "seq_lens must be 4"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            batch.run(caches, wrong)
    for name, numbers, message in [
        ("ids", [3, 4, -1, 5], "token -1 at 2 is not one of 211"),
        ("ids", [3, 4, 5, 211], "token 211 at 3 is not one of 211"),
        ("positions", [0, 48, 40, 5], "position 48 at 1 is not one of 48"),
        ("last", [0, -1], "index of logits -1 at 1 is not one of 4"),
        ("last", [4], "index of logits 4 at 0 is not one of 4"),
    ]:
        wrong_batch = Batch(decoder, DECODES)
        setattr(wrong_batch, name, torch.tensor(numbers))
        with pytest.raises(IndexError, match=message):
            wrong_batch.run(caches)
    other_caches = batch.caches()
    other_caches[1].keys = other_caches[1].keys.float()
    with pytest.raises(RuntimeError, match="keys and values must be contiguous"):
        batch.run(other_caches)


def test_caches_that_their_owner_lets_go_of_are_free_at_once(directories, kernels):
    decoder = decoder_of(directories["gemma3"], kernels)
    batch = Batch(decoder, DECODES)
    caches = batch.caches()
    expected = batch.run(caches)
    held = [weakref.ref(tensor) for cache in caches.values() for tensor in (cache.keys, cache.values)]
    del caches
    assert not any(tensor() is not None for tensor in held)
    assert torch.equal(batch.run(batch.caches()), expected)


def test_a_decoder_in_use_is_gone_at_once_when_nobody_wants_it(directories, kernels):
    decoder = decoder_of(directories["llama"], kernels)
    batch = Batch(decoder, DECODES)
    caches = batch.caches()
    batch.run(caches)
    held = weakref.ref(decoder), weakref.ref(decoder._fused)
    del decoder, batch
    assert held[0]() is None
    assert held[1]() is None


def test_the_debug_build_looks_at_the_numbers(directories):
    decoder = decoder_of(directories["llama"], kernels_of("avx512", is_debug=True))
    batch = Batch(decoder, DECODES)
    metadata = batch.metadata
    assert batch.run(batch.caches()).isfinite().all()
    slots = metadata.slot_mapping.clone()
    slots[2] = batch.num_blocks * BLOCK_SIZE
    with pytest.raises(RuntimeError, match=r"slot \d+ of token 2 is not one of"):
        batch.run(batch.caches(), replace(metadata, slot_mapping=slots))
