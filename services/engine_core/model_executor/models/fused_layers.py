"""All layers of the native decoder in one call of the C++ kernels, for a step of few tokens.

Operation by operation such a step spends much of its time on waking threads up. Computes what the loop of `decoder.py`
does, with the same kernels; made anew whenever the weights are packed. Owner: the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.kernels.cpu_kernels import CpuKernels
from engine_core.model_executor.kernels.few_rows import PanelWeight
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.kv_cache_groups import LayerGroup
from engine_core.model_executor.models.decoder_layer import DecoderLayer, Norm
from engine_core.model_executor.models.rope import Rope

# cos, sin: float32 [T, R] each.
Rotation = tuple[torch.Tensor, torch.Tensor]


class FusedLayers:
    """T tokens, n features."""

    def __init__(
        self, kernels: CpuKernels, layers: Sequence[DecoderLayer], groups: Sequence[LayerGroup], max_tokens: int
    ) -> None:
        # More than that are faster one operation after the other.
        self.max_tokens = max_tokens
        self._indices = [layer.index for layer in layers]
        self._ropes: list[Rope] = list(dict.fromkeys(layer.rope for layer in layers))
        self._first_of_group = [group.layers[0] for group in groups]
        group_of = {index: number for number, group in enumerate(groups) for index in group.layers}
        self._layers = kernels.new_decoder_layers()
        for layer in layers:
            numbers = kernels.activation_number(layer.activation), layer.attention.sliding_window or 0
            self._add(layer, [*numbers, self._ropes.index(layer.rope), group_of[layer.index]])

    def run(self, residual: torch.Tensor, rotations: Mapping[Rope, Rotation], context: PagedAttention) -> torch.Tensor:
        """Adds to residual [T, n]; returns what the last layer has still to add, [T, n]."""
        caches = [context.caches[index] for index in self._indices]
        batches = [context.metadata[index] for index in self._first_of_group]
        branch: torch.Tensor = self._layers.run(
            residual,
            [rotations[rope][0] for rope in self._ropes],
            [rotations[rope][1] for rope in self._ropes],
            [cache.keys for cache in caches],
            [cache.values for cache in caches],
            [batch.slot_mapping for batch in batches],
            [batch.block_tables for batch in batches],
            [batch.seq_lens for batch in batches],
            [batch.query_start_loc for batch in batches],
        )
        return branch

    def _add(self, layer: DecoderLayer, numbers: list[int]) -> None:
        weights = _panels(layer)
        norms = [layer.input_norm, layer.mlp_norm, layer.post_attention_norm, layer.post_mlp_norm, *_qk_norms(layer)]
        self._layers.add(
            [weight.panels for weight in weights],
            [weight.bias for weight in weights],
            [weight.scales for weight in weights],
            [weight.sums for weight in weights],
            [weight.depth for weight in weights],
            [weight.columns for weight in weights],
            [None if norm is None else norm.weight for norm in norms],
            [0.0 if norm is None else norm.eps for norm in norms],
            numbers,
            layer.attention.scale,
            layer.attention.softcap or 0.0,
        )


def fuse_layers(
    kernels: Kernels, layers: Sequence[DecoderLayer], groups: Sequence[LayerGroup], dtype: torch.dtype
) -> FusedLayers | None:
    """None where a layer has what the call does not do: a product in another form, or a sum over workers."""
    if not isinstance(kernels, CpuKernels):
        return None
    if any(len(_panels(layer)) < len(layer.linears) or layer.o.is_reduced for layer in layers):
        return None
    return FusedLayers(kernels, layers, groups, kernels.max_tokens_of_layers(dtype))


def _panels(layer: DecoderLayer) -> list[PanelWeight]:
    """Of the products that have them."""
    return [linear.panels for linear in layer.linears if linear.panels is not None]


def _qk_norms(layer: DecoderLayer) -> tuple[Norm | None, Norm | None]:
    norm = layer.qk_norm
    if norm is None:
        return None, None
    return Norm(norm.query_weight, norm.eps), Norm(norm.key_weight, norm.eps)
