"""The paged KV cache of one layer: two tensors of blocks, written by slot, read by block table.

Owner: the busy-loop thread. Knows nothing of requests; block 0 is the null block and is never read unmasked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Size of one token's KV in one layer, as the layer itself hands it to attention."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class LayerKVCache:
    """keys [num_blocks, num_kv_heads, block_size, key_dim], values [..., value_dim].

    Heads before slots: attention reads one head at a time, and so finds its keys of a block in one piece.
    """

    def __init__(
        self, spec: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, spec.num_kv_heads, block_size)
        self.block_size = block_size
        # Zeros, not garbage: slots that no token wrote are read behind a mask, and 0 * NaN is NaN.
        self.keys = torch.zeros(*shape, spec.key_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, spec.value_dim, dtype=dtype, device=device)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store keys [T, num_kv_heads, key_dim] and values [T, num_kv_heads, value_dim] at slots [T].

        Non-finite numbers become 0: a block goes to another request later, which reads its stale slots behind a mask.
        """
        blocks, offsets = slot_mapping // self.block_size, slot_mapping % self.block_size
        self.keys[blocks, :, offsets] = _finite(keys)
        self.values[blocks, :, offsets] = _finite(values)

    def gather(self, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of block tables [..., N] as [..., num_kv_heads, N * block_size, dim] each."""
        return _gather(self.keys, block_tables), _gather(self.values, block_tables)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def _gather(cache: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    blocks = cache.index_select(0, block_tables.flatten()).view(*block_tables.shape, *cache.shape[1:])
    # [..., N, K, block_size, D] -> [..., K, N, block_size, D]
    return blocks.transpose(-3, -4).flatten(-3, -2)
