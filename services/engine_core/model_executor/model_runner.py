"""One step on the device: differences in, flattened batch through the model, sampled tokens out.

Owner: the busy-loop thread. Knows no scheduler, no session and no stop rule: a request samples when its known tokens
are all computed, and somebody else decides whether it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import build_attention_metadata
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.input_batch import InputBatch
from engine_core.model_executor.models.transformers_backend import TransformersBackend
from engine_core.model_executor.sampler.sampler import sample
from engine_core.model_executor.sampler.sampling_batch import SAMPLING_DTYPE, SamplingBatch
from engine_core.model_executor.step_inputs import StepInputs
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.structured_output.bitmask import GrammarBitmask
from stepwire.errors import InvariantViolation


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step between its forward pass and its sampling."""

    inputs: StepInputs
    # [S, vocab_size]; None when no sequence samples.
    logits: torch.Tensor | None


class ModelRunner:
    """A model with its KV cache and the record of the requests in it."""

    def __init__(
        self, backend: TransformersBackend, dtype: torch.dtype, device: torch.device, max_num_seqs: int
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._caches: list[LayerKVCache] = []
        self._block_size = 0
        self._requests: InputBatch | None = None
        self._pending: _Pending | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token(self._dtype) for spec in self._backend.layer_specs)

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate the cache; requests known before are forgotten."""
        self._caches = self._allocate(num_blocks, block_size)
        self._block_size = block_size
        self._requests = InputBatch(self._max_num_seqs, block_size, self._backend.vocab_size)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the step's differences and run the forward pass. A step without tokens only drops state."""
        if self._requests is None or self._pending is not None:
            raise InvariantViolation("execute_model before initialize_kv_cache, or twice without sample_tokens")
        self._requests.update(scheduler_output)
        inputs = self._requests.prepare(scheduler_output.num_scheduled_tokens)
        logits = self._forward(inputs, self._caches, self._block_size) if inputs.keys else None
        self._pending = _Pending(inputs, logits if inputs.sampled.size else None)

    @torch.inference_mode()
    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        """Choose the tokens of the forward pass just run, within the bitmask, and append them to the record."""
        pending, self._pending = self._pending, None
        if self._requests is None or pending is None:
            raise InvariantViolation("sample_tokens without execute_model")
        inputs, token_ids = pending.inputs, []
        if pending.logits is not None:
            batch = self._requests.sampling_batch(inputs, bitmask)
            token_ids = sample(pending.logits, batch).tolist()
        self._requests.finish_step(inputs, token_ids)
        sampled: list[list[int]] = [[] for _ in inputs.keys]
        for index, token_id in zip(inputs.sampled.tolist(), token_ids, strict=True):
            sampled[index] = [token_id]
        return ModelRunnerOutput(keys=inputs.keys, sampled_token_ids=sampled)

    @torch.inference_mode()
    def run_dummy_step(self, query_lens: list[int], block_size: int) -> None:
        """A step of sequences without requests, sampled at random. Writes to the null block, or to a cache of its own.

        As large as the largest real step, it shows the peak of memory; small, it warms up.
        """
        inputs = _dummy_inputs(query_lens, block_size)
        caches = self._caches or self._allocate(1, block_size)
        logits = self._forward(inputs, caches, block_size)
        params = np.zeros(len(query_lens), dtype=SAMPLING_DTYPE)
        params["temperature"], params["top_p"] = 1.0, 0.9
        sample(logits, SamplingBatch(params, np.zeros(len(query_lens), dtype=np.int64), []))

    def _allocate(self, num_blocks: int, block_size: int) -> list[LayerKVCache]:
        specs = self._backend.layer_specs
        return [LayerKVCache(spec, num_blocks, block_size, self._dtype, self._device) for spec in specs]

    def _forward(self, inputs: StepInputs, caches: list[LayerKVCache], block_size: int) -> torch.Tensor:
        metadata = build_attention_metadata(
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            slot_mapping=inputs.slot_mapping,
            block_size=block_size,
            device=self._device,
        )
        return self._backend.forward(
            self._on_device(inputs.input_ids),
            self._on_device(inputs.positions),
            self._on_device(inputs.logits_indices),
            PagedAttention(caches, metadata),
        )

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _dummy_inputs(query_lens: list[int], block_size: int) -> StepInputs:
    """Sequences of token 0 without a past, all in the null block."""
    lengths = np.array(query_lens, dtype=np.int64)
    positions = np.concatenate([np.arange(length) for length in query_lens])
    return StepInputs(
        keys=[("", index) for index in range(len(query_lens))],
        rows=np.arange(len(query_lens)),
        query_start_loc=np.concatenate([[0], np.cumsum(lengths)]),
        seq_lens=lengths,
        block_tables=np.zeros((len(query_lens), -(-max(query_lens) // block_size)), dtype=np.int64),
        input_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        slot_mapping=positions % block_size,
        sampled=np.arange(len(query_lens)),
    )
