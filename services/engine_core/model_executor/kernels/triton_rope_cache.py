"""Norms of queries and keys, rotation, and the write into the KV cache, in Triton: one pass over qkv."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.kernels.interface import QKNorm


def rope_and_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: LayerKVCache,
    slot_mapping: torch.Tensor,
    qk_norm: QKNorm | None,
) -> None:
    num_kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
    num_heads, half = qkv.shape[1] // head_dim - 2 * num_kv_heads, cos.shape[1]
    # Without norms the place of their weights is read by nobody.
    query_weight, key_weight = (cos, cos) if qk_norm is None else (qk_norm.query_weight, qk_norm.key_weight)
    _rope_and_cache[(len(qkv), num_heads + 2 * num_kv_heads)](
        qkv, cos, sin, cache.keys, cache.values, slot_mapping, query_weight, key_weight,
        0.0 if qk_norm is None else qk_norm.eps, qkv.stride(0), cache.keys.stride(0), cache.keys.stride(1),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, D=head_dim, HALF=half,
        HALF_TILE=triton.next_power_of_2(max(1, half)), REST_TILE=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        BLOCK_SIZE=cache.block_size, HAS_NORM=qk_norm is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _cache_address(cache, slot, head, block_stride, head_stride, BLOCK_SIZE: tl.constexpr, D: tl.constexpr):
    return cache + slot // BLOCK_SIZE * block_stride + head * head_stride + slot % BLOCK_SIZE * D


@triton.jit
def _store_finite(address, values, mask):
    """A block goes to another request later, which reads stale slots behind a mask: 0 * NaN would be NaN."""
    rounded = values.to(address.dtype.element_ty)
    is_finite = tl.abs(rounded.to(tl.float32)) < float("inf")
    tl.store(address, tl.where(is_finite, rounded.to(tl.float32), 0.0).to(rounded.dtype), mask=mask)


@triton.jit
def _rope_and_cache(
    qkv, cos, sin, key_cache, value_cache, slot_mapping, query_weight, key_weight, eps,
    row_stride, block_stride, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    HALF_TILE: tl.constexpr, REST_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Program (token, head), heads being those of queries, then of keys, then of values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv + token * row_stride + head * D
    slot = tl.load(slot_mapping + token)
    pairs, rest = tl.arange(0, HALF_TILE), tl.arange(0, REST_TILE)
    is_pair, is_rest = pairs < HALF, rest < D - 2 * HALF
    first = tl.load(source + pairs, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
    others = tl.load(source + 2 * HALF + rest, mask=is_rest, other=0.0).to(tl.float32)
    if head >= NUM_HEADS + NUM_KV_HEADS:
        kv_head = head - NUM_HEADS - NUM_KV_HEADS
        target = _cache_address(value_cache, slot, kv_head, block_stride, head_stride, BLOCK_SIZE, D)
        _store_finite(target + pairs, first, is_pair)
        _store_finite(target + HALF + pairs, second, is_pair)
        _store_finite(target + 2 * HALF + rest, others, is_rest)
        return
    if HAS_NORM:
        squares = tl.sum(first * first, 0) + tl.sum(second * second, 0) + tl.sum(others * others, 0)
        inverse = tl.rsqrt(squares / D + eps)
        weight = query_weight if head < NUM_HEADS else key_weight
        # Rounded, as a norm that is an operation of its own would round.
        dtype: tl.constexpr = qkv.dtype.element_ty
        first = (first * inverse * tl.load(weight + pairs, mask=is_pair)).to(dtype).to(tl.float32)
        second = (second * inverse * tl.load(weight + HALF + pairs, mask=is_pair)).to(dtype).to(tl.float32)
        others = (others * inverse * tl.load(weight + 2 * HALF + rest, mask=is_rest)).to(dtype).to(tl.float32)
    cosine = tl.load(cos + token * HALF + pairs, mask=is_pair)
    sine = tl.load(sin + token * HALF + pairs, mask=is_pair)
    turned_first, turned_second = first * cosine - second * sine, second * cosine + first * sine
    if head >= NUM_HEADS:
        target = _cache_address(key_cache, slot, head - NUM_HEADS, block_stride, head_stride, BLOCK_SIZE, D)
        _store_finite(target + pairs, turned_first, is_pair)
        _store_finite(target + HALF + pairs, turned_second, is_pair)
        _store_finite(target + 2 * HALF + rest, others, is_rest)
    else:
        tl.store(source + pairs, turned_first.to(qkv.dtype.element_ty), mask=is_pair)
        tl.store(source + HALF + pairs, turned_second.to(qkv.dtype.element_ty), mask=is_pair)
        tl.store(source + 2 * HALF + rest, others.to(qkv.dtype.element_ty), mask=is_rest)
