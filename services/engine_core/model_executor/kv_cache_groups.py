"""Which layers share a block table, and which share their tensors: from what the layers ask of attention.

A block holds tokens for one group of layers at a time. So that any group can use any block, the groups are made equally
large, and the j-th layer of every group has its KV in the j-th tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from engine_core.model_executor.attention.kv_cache import LayerSpec


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with one block table. None for the window: full attention."""

    layers: tuple[int, ...]
    sliding_window: int | None

    def describe(self) -> KVCacheGroup:
        """What the scheduler's side must know."""
        return KVCacheGroup(len(self.layers), self.sliding_window)


def group_layers(
    specs: Mapping[int, LayerSpec], windows: Mapping[int, int | None], max_num_tokens: int
) -> tuple[LayerGroup, ...]:
    """Groups of the layers in `specs`; a window that no sequence of `max_num_tokens` outgrows is none.

    Layers of one kind are one group. Layers of several kinds could not share tensors unless their KV has one size;
    where it has not, one full-attention group keeps all tokens for all layers.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer_idx in sorted(specs):
        window = windows[layer_idx]
        kinds.setdefault(None if window is None or window >= max_num_tokens else window, []).append(layer_idx)
    if len(kinds) == 1:
        window, layers = kinds.popitem()
        return (LayerGroup(tuple(layers), window),)
    if len(set(specs.values())) > 1:
        return (LayerGroup(tuple(sorted(specs)), None),)
    size = _group_size([len(layers) for layers in kinds.values()])
    return tuple(
        LayerGroup(tuple(layers[start : start + size]), window)
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    )


def tensor_specs(groups: tuple[LayerGroup, ...], specs: Mapping[int, LayerSpec]) -> list[LayerSpec]:
    """The tensors of the cache: of the j-th layer of a largest group each."""
    largest = max(groups, key=lambda group: len(group.layers))
    return [specs[layer_idx] for layer_idx in largest.layers]


def _group_size(counts: list[int]) -> int:
    """Of the counts of layers by kind the one that leaves the fewest places of tensors empty; of equals the largest."""
    return min(counts, key=lambda size: (size * sum(-(-count // size) for count in counts), -size))
