"""One step on the device: differences in, flattened batch through the model, sampled tokens out.

Owner: the busy-loop thread. Knows no scheduler, no session and no stop rule: a request samples when its known tokens
are all computed, and somebody else decides whether it goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine_core.model_executor.attention.kv_cache import LayerKVCache, LayerSpec
from engine_core.model_executor.attention.metadata import AttentionMetadata
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.decode_graphs import DecodeGraphs
from engine_core.model_executor.host_to_device import on_device
from engine_core.model_executor.huge_pages import use_huge_pages
from engine_core.model_executor.input_batch import InputBatch
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.kv_cache_groups import tensor_specs
from engine_core.model_executor.model_cache import Progress
from engine_core.model_executor.model_weights import ModelWeights
from engine_core.model_executor.models.backend import ModelBackend
from engine_core.model_executor.pooling import pool
from engine_core.model_executor.sampler.logprobs import pack_prompt, pack_sampled, raw_logprobs
from engine_core.model_executor.sampler.nan_check import keys_with_nan, rows_with_nan
from engine_core.model_executor.sampler.sampler import sample
from engine_core.model_executor.sampler.sampling_batch import SAMPLING_DTYPE, SamplingBatch
from engine_core.model_executor.staging import copies_to, stage
from engine_core.model_executor.step_inputs import StepInputs
from engine_core.scheduler.output import ModelRunnerOutput, PromptLogprobs, SchedulerOutput
from engine_core.scheduler.request import RequestKey
from engine_core.structured_output.bitmask import GrammarBitmask
from stepwire.errors import InvariantViolation
from stepwire.packed_logprobs import PackedLogprobs


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step between its forward pass and its sampling."""

    inputs: StepInputs
    # [S, vocab_size]; None when no sequence samples.
    logits: torch.Tensor | None
    # Made with the forward pass: its hidden states are gone with the next one.
    prompt_logprobs: dict[RequestKey, PromptLogprobs]
    # Vectors of the prompts that are complete.
    pooled: dict[RequestKey, bytes]


class ModelRunner:
    """A model with its KV cache and the record of the requests in it."""

    def __init__(
        self,
        backend: ModelBackend,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
        kernels: Kernels,
    ) -> None:
        self._backend = backend
        self._kernels = kernels
        self._dtype = dtype
        self._device = device
        self._max_num_seqs = max_num_seqs
        # By index of the layer: a stage of a pipeline has some of the model's.
        self._caches: dict[int, LayerKVCache] = {}
        self._num_blocks = 0
        self._block_size = 0
        self._requests: InputBatch | None = None
        self._pending: _Pending | None = None
        self._to_device = copies_to(device)
        # Where decode steps are replayed.
        self.graphs: DecodeGraphs | None = None
        # Whether the requests whose logits have NaN are named.
        self.checks_nan = False

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(spec.bytes_per_token(self._dtype) for spec in self._tensor_specs())

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate the cache; requests known before are forgotten."""
        self._caches = self._allocate(num_blocks, block_size)
        self._num_blocks, self._block_size = num_blocks, block_size
        num_groups = len(self._backend.layer_groups)
        self._requests = InputBatch(self._max_num_seqs, block_size, self._backend.vocab_size, num_groups)

    def release_kv_cache(self) -> int:
        """Drop the cache and keep the record of the requests; returns its size in bytes."""
        freed_bytes = self._num_blocks * self._block_size * self.kv_bytes_per_token if self._caches else 0
        self.drop_graphs()
        self._caches = {}
        return freed_bytes

    def restore_kv_cache(self) -> None:
        """Allocate it again; all blocks are empty."""
        if not self._caches:
            self._caches = self._allocate(self._num_blocks, self._block_size)

    @property
    def weights(self) -> ModelWeights:
        return self._backend.weights

    def move_weights(self, device: torch.device) -> int:
        """Move the weights; returns the bytes that this took off the device they were on, 0 when they were there."""
        self.drop_graphs()
        return self._backend.move_weights(device)

    def record_graphs(self, block_size: int, progress: Progress) -> None:
        """Record decode steps, if they are to be replayed; before there is a cache, over one of a single block."""
        if self.graphs is not None:
            self.graphs.capture(self._caches or self._allocate(1, block_size), progress)

    def drop_graphs(self) -> None:
        """Weights or caches are about to move."""
        if self.graphs is not None:
            self.graphs.drop()

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the step's differences and run the forward pass. A step without tokens only drops state."""
        if self._requests is None or self._pending is not None:
            raise InvariantViolation("execute_model before initialize_kv_cache, or twice without sample_tokens")
        self._requests.update(scheduler_output)
        inputs = self._requests.prepare(scheduler_output.num_scheduled_tokens)
        logits = self._run(inputs) if inputs.keys else None
        prompt_logprobs, pooled = self._prompt_logprobs(inputs), self._pool(inputs)
        self._pending = _Pending(inputs, logits if inputs.sampled.size else None, prompt_logprobs, pooled)

    @torch.inference_mode()
    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        """Choose the tokens of the forward pass just run, within the bitmask, and append them to the record."""
        pending, requests = self._take_pending(), self._record()
        inputs, logits = pending.inputs, pending.logits
        # Before sampling, which changes the logits; read behind it, so that the device is waited for once.
        nan_rows = rows_with_nan(logits) if self.checks_nan and logits is not None else None
        token_ids, logprobs = self._sample(logits, inputs, requests, bitmask)
        requests.finish_step(inputs, token_ids)
        sampled = _by_sequence(inputs, token_ids)
        nan_keys = [] if nan_rows is None else keys_with_nan(inputs, nan_rows)
        return ModelRunnerOutput(inputs.keys, sampled, logprobs, pending.prompt_logprobs, pending.pooled, nan_keys)

    @torch.inference_mode()
    def run_dummy_step(self, query_lens: list[int], block_size: int) -> None:
        """A step of sequences without requests, sampled at random. Writes to the null block, or to a cache of its own.

        As large as the largest real step, it shows the peak of memory; small, it warms up.
        """
        inputs = _dummy_inputs(query_lens, block_size, len(self._backend.layer_groups))
        caches = self._caches or self._allocate(1, block_size)
        logits = self._forward(inputs, caches, block_size)
        # None where another worker samples.
        params = np.zeros(len(logits), dtype=SAMPLING_DTYPE)
        params["temperature"], params["top_p"] = 1.0, 0.9
        if len(logits):
            rows = np.arange(len(logits))
            sample(logits, SamplingBatch(rows, params, np.zeros_like(rows), []))

    def _record(self) -> InputBatch:
        if self._requests is None:
            raise InvariantViolation("a step before initialize_kv_cache")
        return self._requests

    def _take_pending(self) -> _Pending:
        pending, self._pending = self._pending, None
        if pending is None:
            raise InvariantViolation("sample_tokens without execute_model")
        return pending

    def _logits_indices(self, inputs: StepInputs) -> np.ndarray:
        """The tokens of the step behind which the model says what comes next."""
        return inputs.logits_indices

    def _prompt_logprobs(self, inputs: StepInputs) -> dict[RequestKey, PromptLogprobs]:
        return {rows.key: pack_prompt(rows, self._logits) for rows in self._record().prompt_logprobs(inputs)}

    def _pool(self, inputs: StepInputs) -> dict[RequestKey, bytes]:
        chunks = self._record().pooled_chunks(inputs)
        return pool(chunks, self._backend.hidden_states()) if chunks else {}

    def _sample(
        self,
        logits: torch.Tensor | None,
        inputs: StepInputs,
        requests: InputBatch,
        bitmask: GrammarBitmask | None,
    ) -> tuple[np.ndarray, dict[RequestKey, PackedLogprobs]]:
        """logits [S, vocab_size] -> the tokens [S], and the log-probabilities of those that ask."""
        if logits is None:
            return np.zeros(0, dtype=np.int64), {}
        asked = requests.sampled_logprobs(inputs)
        # Before sampling, which changes the logits.
        logprobs = raw_logprobs(logits, asked) if asked else None
        token_ids = sample(logits, requests.sampling_batch(inputs, bitmask))
        return token_ids, pack_sampled(logprobs, asked, token_ids.tolist()) if logprobs is not None else {}

    def _logits(self, logits_indices: np.ndarray) -> torch.Tensor:
        return self._backend.logits(self._on_device(logits_indices))

    def _allocate(self, num_blocks: int, block_size: int) -> dict[int, LayerKVCache]:
        tensors = [
            LayerKVCache(spec, num_blocks, block_size, self._dtype, self._device) for spec in self._tensor_specs()
        ]
        use_huge_pages((part for tensor in tensors for part in (tensor.keys, tensor.values)), are_written=False)
        return {
            layer_idx: tensor
            for group in self._backend.layer_groups
            # A smaller group leaves the last ones unused.
            for layer_idx, tensor in zip(group.layers, tensors, strict=False)
        }

    def _tensor_specs(self) -> list[LayerSpec]:
        return tensor_specs(self._backend.layer_groups, self._backend.layer_specs)

    def _run(self, inputs: StepInputs) -> torch.Tensor:
        if self.graphs is not None and self.graphs.fits(inputs) and not self._needs_hidden_states(inputs):
            return self.graphs.forward(inputs, self._caches)
        return self._forward(inputs, self._caches, self._block_size)

    def _needs_hidden_states(self, inputs: StepInputs) -> bool:
        """A replay leaves them nowhere."""
        requests = self._record()
        return bool(requests.prompt_logprobs(inputs) or requests.pooled_chunks(inputs))

    def _forward(self, inputs: StepInputs, caches: dict[int, LayerKVCache], block_size: int) -> torch.Tensor:
        step = stage(inputs, self._logits_indices(inputs), block_size, self._to_device)
        metadata: dict[int, AttentionMetadata] = {}
        for group, of_group in zip(self._backend.layer_groups, step.metadata, strict=True):
            metadata.update(dict.fromkeys(group.layers, of_group))
        context = PagedAttention(caches, metadata, self._kernels)
        return self._backend.forward(step.input_ids, step.positions, step.logits_indices, context)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return on_device(array, self._device)


def _dummy_inputs(query_lens: list[int], block_size: int, num_groups: int) -> StepInputs:
    """Sequences of token 0 without a past, all in the null block."""
    lengths = np.array(query_lens, dtype=np.int32)
    query_start_loc = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in query_lens])
    block_tables = np.zeros((len(query_lens), -(-max(query_lens) // block_size)), dtype=np.int32)
    return StepInputs(
        keys=[("", index) for index in range(len(query_lens))],
        rows=np.arange(len(query_lens)),
        query_start_loc=query_start_loc,
        seq_lens=lengths,
        prompt_lens=lengths,
        block_tables=(block_tables,) * num_groups,
        input_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        slot_mappings=(positions % block_size,) * num_groups,
        sampled=np.arange(len(query_lens)),
        logits_indices=np.cumsum(query_lens) - 1,
    )


def _by_sequence(inputs: StepInputs, token_ids: np.ndarray) -> list[list[int]]:
    """The tokens [S] of the sampled sequences; none for the others."""
    if len(token_ids) == len(inputs.keys):
        return [[token_id] for token_id in token_ids.tolist()]
    by_sequence: list[list[int]] = [[] for _ in inputs.keys]
    for index, token_id in zip(inputs.sampled.tolist(), token_ids.tolist(), strict=True):
        by_sequence[index] = [token_id]
    return by_sequence
