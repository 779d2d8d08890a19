"""The native decoder from token ids to logits in one call of the C++ kernels, for a step of up to some thousand tokens.

Operation by operation such a step spends much of its time on waking threads up, and on what only one of them does.
Computes what the loop of `decoder.py` does, with the same kernels; made anew whenever the weights are packed. Owner:
the thread that runs the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.kernels.cpu_kernels import CpuKernels
from engine_core.model_executor.kernels.few_rows import PanelWeight
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.kv_cache_groups import LayerGroup
from engine_core.model_executor.models.decoder_layer import DecoderLayer, Norm
from engine_core.model_executor.models.linear import FusedLinear
from engine_core.model_executor.models.rope import Rope


@dataclass(frozen=True, slots=True)
class DecoderEnds:
    """What a decoder has besides its layers."""

    # A module of the loaded one.
    embedding: Any
    final_norm: Norm
    head: FusedLinear


class FusedLayers:
    """T tokens, n features."""

    def __init__(
        self,
        kernels: CpuKernels,
        layers: Sequence[DecoderLayer],
        groups: Sequence[LayerGroup],
        ends: DecoderEnds,
        max_tokens: int,
    ) -> None:
        """The embedding is one that `embedding_scale` knows."""
        # More than that are faster one operation after the other.
        self.max_tokens = max_tokens
        self._indices = [layer.index for layer in layers]
        ropes: list[Rope] = list(dict.fromkeys(layer.rope for layer in layers))
        self._first_of_group = [group.layers[0] for group in groups]
        group_of = {index: number for number, group in enumerate(groups) for index in group.layers}
        self._layers = kernels.new_decoder_layers()
        for layer in layers:
            numbers = kernels.activation_number(layer.activation), layer.attention.sliding_window or 0
            self._add(layer, [*numbers, ropes.index(layer.rope), group_of[layer.index]])
        for rope in ropes:
            self._layers.add_rotation(rope.inv_freq, rope.attention_scaling)
        self._set_ends(ends)
        # The first of the caches that the layers know; whoever has allocated them may let go of them at any time.
        self._known_cache: weakref.ref[LayerKVCache] | None = None

    def run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor, context: PagedAttention
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """input_ids and positions [T], logits_indices [N] -> hidden states behind the final norm [T, n], and logits.

        No logits where another product is faster, or the head lies in another form.
        """
        if self._known_cache is None or self._known_cache() is not context.caches[self._indices[0]]:
            self._set_caches(context.caches)
        batches = [context.metadata[index] for index in self._first_of_group]
        hidden, logits = self._layers.run(
            input_ids,
            positions,
            logits_indices,
            [batch.slot_mapping for batch in batches],
            [batch.block_tables for batch in batches],
            [batch.seq_lens for batch in batches],
            [batch.query_start_loc for batch in batches],
        )
        return hidden, logits

    def _set_caches(self, of_layers: Mapping[int, LayerKVCache]) -> None:
        # Without its callback: nobody may forget the new ones when the old ones go.
        self._known_cache = None
        caches = [of_layers[index] for index in self._indices]
        self._layers.set_caches([cache.keys for cache in caches], [cache.values for cache in caches])
        # Without a reference to this object: in a cycle the weights would wait for the garbage collector.
        layers = self._layers
        self._known_cache = weakref.ref(caches[0], lambda _: layers.forget_caches())

    def _set_ends(self, ends: DecoderEnds) -> None:
        head = ends.head.panels
        self._layers.set_ends(
            ends.embedding.weight.detach(),
            embedding_scale(ends.embedding),
            ends.final_norm.weight,
            ends.final_norm.eps,
            [] if head is None else [head.panels, head.bias, head.scales, head.sums],
            0 if head is None else head.columns,
        )

    def _add(self, layer: DecoderLayer, numbers: list[int]) -> None:
        weights = _panels(layer)
        norms = [layer.input_norm, layer.mlp_norm, layer.post_attention_norm, layer.post_mlp_norm, *_qk_norms(layer)]
        self._layers.add_layer(
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
    kernels: Kernels,
    layers: Sequence[DecoderLayer],
    groups: Sequence[LayerGroup],
    ends: DecoderEnds,
    dtype: torch.dtype,
) -> FusedLayers | None:
    """None where there is what the call does not do: a product in another form, a sum over workers, an embedding."""
    if not isinstance(kernels, CpuKernels) or embedding_scale(ends.embedding) is None:
        return None
    if any(len(_panels(layer)) < len(layer.linears) or layer.o.is_reduced for layer in layers):
        return None
    return FusedLayers(kernels, layers, groups, ends, kernels.max_tokens_of_layers(dtype))


def embedding_scale(embedding: Any) -> float | None:
    """What rows of its table are multiplied by; None for a module that does more than look them up and scale them."""
    if not isinstance(embedding, torch.nn.Embedding) or embedding.max_norm is not None:
        return None
    if not embedding.weight.is_contiguous():
        return None
    if type(embedding) is torch.nn.Embedding:
        return 1.0
    # Of Gemma, in transformers; rounded as the product is.
    scale = getattr(embedding, "embed_scale", None)
    return float(scale.to(embedding.weight.dtype)) if isinstance(scale, torch.Tensor) else None


def _panels(layer: DecoderLayer) -> list[PanelWeight]:
    """Of the products that have them."""
    return [linear.panels for linear in layer.linears if linear.panels is not None]


def _qk_norms(layer: DecoderLayer) -> tuple[Norm | None, Norm | None]:
    norm = layer.qk_norm
    if norm is None:
        return None, None
    return Norm(norm.query_weight, norm.eps), Norm(norm.key_weight, norm.eps)
