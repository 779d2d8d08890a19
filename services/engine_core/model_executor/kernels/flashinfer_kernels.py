"""Attention by FlashInfer, everything else in Triton.

FlashInfer plans a launch on the host, by the lengths of all sequences: once a step for each kind of layer, from the
arrays that are on the host anyway. Imports flashinfer: only to be imported when it is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata
from engine_core.model_executor.kernels.triton_kernels import TritonKernels
from engine_core.model_executor.startup_error import StartupError

# What its documentation recommends.
_WORKSPACE_BYTES = 128 * 2**20
_HEAD_DIMS = (64, 128, 256)
# [num_blocks, heads, block_size, head size], as the cache is.
_LAYOUT = "HND"
# From so many queries for each key on, tensor cores pay in a decode.
_FEWEST_QUERIES_FOR_TENSOR_CORES = 4


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers that can share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_decode: bool
    scale: float
    sliding_window: int | None
    softcap: float | None


@dataclass(slots=True)
class _Plan:
    wrapper: Any
    # Of the step it was made for.
    metadata: AttentionMetadata | None = None


class FlashInferKernels(TritonKernels):
    """Implements `Kernels`. Not to be recorded in a CUDA graph: a plan is made on the host in every step."""

    name = "flashinfer"

    def __init__(self, num_processors: int, device: torch.device) -> None:
        super().__init__(num_processors)
        # Shared: layers run one after the other. Zeros, as it asks for the first use.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # One for each kind and each group of layers: a plan that is on its way to the device must not be overwritten.
        self._plans: dict[tuple[_Kind, int], _Plan] = {}

    def paged_attention(
        self,
        query: torch.Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        kind = _Kind(
            num_heads=query.shape[1],
            num_kv_heads=cache.keys.shape[1],
            head_dim=query.shape[2],
            is_decode=metadata.max_query_len == 1,
            scale=options.scale,
            sliding_window=options.sliding_window,
            softcap=options.softcap,
        )
        plan = self._plans.get((kind, metadata.group))
        if plan is None:
            plan = self._plans[kind, metadata.group] = _Plan(self._wrapper(kind))
        if plan.metadata is not metadata:
            _make(plan.wrapper, kind, metadata, query.dtype)
            plan.metadata = metadata
        plan.wrapper.run(query.contiguous(), (cache.keys, cache.values), out=out)

    def _wrapper(self, kind: _Kind) -> Any:
        if kind.head_dim not in _HEAD_DIMS:
            raise StartupError(
                f"--attention-backend flashinfer knows heads of {', '.join(map(str, _HEAD_DIMS))} features; "
                f"this model's have {kind.head_dim}"
            )
        if not kind.is_decode:
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT)
        queries_for_each_key = kind.num_heads // kind.num_kv_heads
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, use_tensor_cores=queries_for_each_key >= _FEWEST_QUERIES_FOR_TENSOR_CORES
        )


def _make(wrapper: Any, kind: _Kind, metadata: AttentionMetadata, dtype: torch.dtype) -> None:
    """Tell the wrapper the step's lengths and blocks; all on the host, so that it need not fetch them."""
    host, block_size = metadata.host, metadata.block_size
    num_blocks = -(-host.seq_lens // block_size)
    is_used = np.arange(host.block_tables.shape[1]) < num_blocks[:, None]
    pages = [
        np.concatenate([[0], np.cumsum(num_blocks)]),
        host.block_tables[is_used],
        host.seq_lens - (num_blocks - 1) * block_size,
    ]
    if not kind.is_decode:
        pages.insert(0, host.query_start_loc)
    wrapper.plan(
        *(torch.from_numpy(page.astype(np.int32)) for page in pages),
        kind.num_heads,
        kind.num_kv_heads,
        kind.head_dim,
        block_size,
        # The queries' own position is not counted.
        window_left=-1 if kind.sliding_window is None else kind.sliding_window - 1,
        logits_soft_cap=kind.softcap,
        sm_scale=kind.scale,
        q_data_type=dtype,
        kv_data_type=dtype,
        **({} if kind.is_decode else {"causal": True}),
    )
