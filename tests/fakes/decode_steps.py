"""Steps of one token a sequence over random caches, and a tiny native decoder to run them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata, build_attention_metadata
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.kernels.torch_kernels import TorchKernels
from engine_core.model_executor.loader import load_model
from engine_core.model_executor.models.backend import ModelBackend
from engine_core.model_executor.models.decoder import NativeDecoder
from engine_core.model_executor.models.linear import LinearOptions, Multiply
from engine_core.model_executor.models.transformers_backend import TransformersBackend
from engine_core.model_executor.staging import copies_to, stage
from engine_core.model_executor.step_inputs import StepInputs
from fakes.tiny_models import VOCAB_SIZE

BLOCK_SIZE = 4
# Of one sequence.
NUM_COLUMNS = 4
CPU = torch.device("cpu")


class DeviceKernels(TorchKernels):
    """The reference, but what the batch is it reads from the tensors, as kernels on a device do, in every call."""

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        fresh = build_attention_metadata(
            query_start_loc=metadata.query_start_loc.numpy().astype(np.int64),
            seq_lens=metadata.seq_lens.numpy(),
            prompt_lens=metadata.seq_lens.numpy(),
            block_tables=metadata.block_tables.numpy(),
            slot_mapping=metadata.slot_mapping.numpy(),
            block_size=metadata.block_size,
            device=CPU,
        )
        super().paged_attention(query, cache, fresh, options, out)


def native_decoder(directory: Path, kernels: Kernels | None = None, multiply: Multiply | None = None) -> NativeDecoder:
    loaded = load_model(EngineSettings(model="m", device="cpu"), directory, lambda _: None)
    probed = TransformersBackend("m", loaded)
    return NativeDecoder(loaded, probed, kernels or TorchKernels(), None, LinearOptions(multiply))


def random_caches(backend: ModelBackend, num_blocks: int, seed: int = 0) -> dict[int, LayerKVCache]:
    generator = torch.Generator().manual_seed(seed)
    caches = {}
    for index, spec in backend.layer_specs.items():
        cache = caches[index] = LayerKVCache(spec, num_blocks, BLOCK_SIZE, torch.float32, CPU)
        cache.keys.normal_(generator=generator)
        cache.values.normal_(generator=generator)
    return caches


def step_of(sequences: list[tuple[int, int, int]], num_groups: int = 1, sampled: list[int] | None = None) -> StepInputs:
    """Sequences of (number, tokens computed before, tokens of this step). Sequence n owns blocks of its own."""
    numbers, computed, counts = (np.array(values) for values in zip(*sequences, strict=True))
    seq_lens = (computed + counts).astype(np.int32)
    num_columns = -(-int(seq_lens.max()) // BLOCK_SIZE)
    table = (1 + numbers[:, None] * NUM_COLUMNS + np.arange(num_columns)).astype(np.int32)
    rows = np.repeat(np.arange(len(sequences)), counts)
    query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.arange(len(rows)) - query_start_loc[rows] + computed[rows]
    slots = table[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    indices = np.arange(len(sequences)) if sampled is None else np.array(sampled)
    return StepInputs(
        keys=[("s", int(number)) for number in numbers],
        rows=numbers,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        prompt_lens=seq_lens,
        block_tables=(table,) * num_groups,
        input_ids=(numbers[rows] * 31 + positions * 7) % VOCAB_SIZE,
        positions=positions,
        slot_mappings=(slots,) * num_groups,
        sampled=indices,
        logits_indices=(query_start_loc[1:] - 1)[indices].astype(np.int64),
    )


@torch.inference_mode()
def eager(
    backend: ModelBackend, inputs: StepInputs, caches: dict[int, LayerKVCache], kernels: Kernels | None = None
) -> torch.Tensor:
    step = stage(inputs, inputs.logits_indices, BLOCK_SIZE, copies_to(CPU))
    metadata = {
        index: of_group
        for group, of_group in zip(backend.layer_groups, step.metadata, strict=True)
        for index in group.layers
    }
    context = PagedAttention(caches, metadata, kernels or TorchKernels())
    return backend.forward(step.input_ids, step.positions, step.logits_indices, context)
