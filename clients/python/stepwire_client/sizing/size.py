"""What fits where: weights, KV cache, context and concurrency of a model on a device. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from stepwire_client.sizing.kv_cache import Layout, layout_of
from stepwire_client.sizing.model_shape import DTYPE_BYTES, ModelShape, SizingError
from stepwire_client.sizing.weights import num_weights, num_weights_of_worker

GIB = 1 << 30
# The CUDA context of a process and its recorded decode steps; the engine measures both when it starts.
_FIXED_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's settings of the same names, and the bytes it finds: of one GPU, or of a CPU's KV cache."""

    gpu_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    # None: an estimate. What the largest step and recorded steps take on one GPU.
    overhead_bytes: int | None = None
    kv_cache_bytes: int = 0
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int = 0
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes are of one worker, unless they say otherwise; tokens and requests are of the engine."""

    dtype: str
    num_parameters: int
    weight_bytes: int
    overhead_bytes: int
    kv_bytes_per_token: int
    kv_bytes: int
    num_blocks: int
    kv_tokens: int
    max_model_len: int
    context: int
    # Requests of `context` tokens that fit the cache, and how many of them a step takes.
    fitting_requests: int
    concurrency: int


def size(shape: ModelShape, settings: Settings, context: int = 0) -> Size:
    """`context` is prompt and answer of one request in tokens; 0 = the longest allowed. Raises SizingError."""
    dtype = _dtype(shape, settings)
    layout = layout_of(shape, settings.block_size, settings.max_num_batched_tokens)
    weight_bytes = num_weights_of_worker(shape, settings.tensor_parallel_size) * DTYPE_BYTES[dtype]
    overhead = _overhead(shape, settings, dtype)
    per_token = layout.layers_per_block * shape.kv_layer_bytes(dtype, settings.tensor_parallel_size)
    num_blocks = _kv_budget(settings, weight_bytes, overhead) // (per_token * settings.block_size)
    max_model_len = _max_model_len(shape, settings, layout, num_blocks)
    context = context or max_model_len
    if context > max_model_len:
        raise SizingError(f"--context: {context} is above the longest that is served, {max_model_len}")
    fitting = (num_blocks - 1) // layout.most_blocks(context)
    return Size(
        dtype=dtype,
        num_parameters=num_weights(shape),
        weight_bytes=weight_bytes,
        overhead_bytes=overhead,
        kv_bytes_per_token=per_token,
        kv_bytes=num_blocks * settings.block_size * per_token,
        num_blocks=num_blocks,
        kv_tokens=layout.tokens_that_fit(num_blocks, max_model_len),
        max_model_len=max_model_len,
        context=context,
        fitting_requests=fitting,
        concurrency=min(fitting, settings.max_num_seqs),
    )


def _dtype(shape: ModelShape, settings: Settings) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    return shape.dtype or "float32" if settings.gpu_bytes else "float32"


def _overhead(shape: ModelShape, settings: Settings, dtype: str) -> int:
    """The largest step of a GPU, roughly: activations of one layer for all its tokens, and logits of all requests."""
    if settings.overhead_bytes is not None:
        return settings.overhead_bytes
    if not settings.gpu_bytes:
        return 0
    features = 6 * shape.hidden_size + 3 * shape.intermediate_size // settings.tensor_parallel_size
    activations = settings.max_num_batched_tokens * features * DTYPE_BYTES[dtype]
    # In the model's type, and three times as float32 while tokens are chosen.
    logits = settings.max_num_seqs * shape.vocab_size * (DTYPE_BYTES[dtype] + 3 * 4)
    return _FIXED_BYTES + activations + logits


def _kv_budget(settings: Settings, weight_bytes: int, overhead: int) -> int:
    """Bytes for the KV cache of one worker."""
    if not settings.gpu_bytes:
        # All workers of a CPU take from the same memory.
        return settings.kv_cache_bytes // settings.tensor_parallel_size
    return int(settings.gpu_bytes * settings.gpu_memory_utilization) - weight_bytes - overhead


def _max_model_len(shape: ModelShape, settings: Settings, layout: Layout, num_blocks: int) -> int:
    wanted = settings.max_model_len if settings.max_model_len > 0 else shape.max_model_len
    if wanted > shape.max_model_len:
        raise SizingError(f"--max-model-len: {wanted} is above the model's own limit of {shape.max_model_len} tokens")
    capacity = layout.longest_that_fits(num_blocks, shape.max_model_len) if num_blocks > 1 else 0
    if capacity < 1:
        raise SizingError("no KV cache fits: the weights and the largest step take all memory; use more, or more GPUs")
    if settings.max_model_len == -1:
        return capacity
    if wanted > capacity:
        raise SizingError(
            f"a context of {wanted} tokens does not fit the KV cache; the largest that fits is {capacity} "
            f"(--max-model-len {capacity} or -1)"
        )
    return wanted
