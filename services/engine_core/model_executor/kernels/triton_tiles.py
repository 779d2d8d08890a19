"""What the Triton attention kernels share: a tile of keys and values out of the paged cache, and one round of softmax.

Device code. A key's address comes from the block table; offsets into the cache have 64 bits. One round changes a row
only through the keys that it sees, so that what else is in a tile never shows in a row's result.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Triton's interpreter holds bfloat16 as integers, and multiplies them as such. Products of float32 are the same.
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def key_offsets(table, head, keys, is_key, block_stride, head_stride, BLOCK_SIZE: tl.constexpr, D: tl.constexpr):
    """Where in the cache the vectors of keys [N] of one sequence begin, as int64 [N]."""
    blocks = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    return blocks * block_stride + head * head_stride + (keys % BLOCK_SIZE) * D


@triton.jit
def tanh(x):
    # Of the absolute value, so that nothing overflows.
    vanishing = tl.exp(-2 * tl.abs(x))
    result = (1 - vanishing) / (1 + vanishing)
    return tl.where(x < 0, -result, result)


@triton.jit
def multiply(a, b):
    """a [M, K] times b [K, N], summed in float32. float32 is not cut to the 19 bits that tensor cores like."""
    if _IS_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def softmax_round(
    query, key_cache, value_cache, offsets, is_visible, state_max, state_sum, state_values, scale, softcap,
    D: tl.constexpr, D_TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Take the keys at offsets [N] into a running softmax of rows [M]: its maximum (of base 2), sum, and values.

    query [M, D_TILE]; is_visible [M, N].
    """
    features = tl.arange(0, D_TILE)
    is_any = tl.max(is_visible.to(tl.int32), 0) > 0
    mask = is_any[:, None] & (features < D)[None, :]
    addresses = offsets[:, None] + features[None, :]
    keys = tl.load(key_cache + addresses, mask=mask, other=0.0)
    scores = multiply(query, tl.trans(keys)) * scale
    if HAS_SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))
    new_max = tl.maximum(state_max, tl.max(scores, 1))
    # A row that has seen nothing yet: its weights are exp2(-inf - 0) = 0, not NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(state_max - base)
    values = tl.load(value_cache + addresses, mask=mask, other=0.0)
    new_values = multiply(weights.to(values.dtype), values)
    return new_max, state_sum * shrink + tl.sum(weights, 1), state_values * shrink[:, None] + new_values
