"""Which backend computes a loaded model: the native decoder where it can, else transformers.

Used by the thread that starts the engine. The native decoder is not taken at its word: before it serves, it computes a
few tokens and is compared with transformers.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.layer_probe import LayerProbe
from engine_core.model_executor.attention.metadata import build_attention_metadata
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.kernels.cpu_kernels import CpuKernels
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.loader import LoadedModel
from engine_core.model_executor.models.backend import ModelBackend
from engine_core.model_executor.models.decoder import NativeDecoder
from engine_core.model_executor.models.linear import LinearOptions
from engine_core.model_executor.models.native_support import reason_against
from engine_core.model_executor.models.transformers_backend import TransformersBackend
from engine_core.model_executor.parallel.worker_group import WorkerGroup
from engine_core.model_executor.startup_error import StartupError

logger = logging.getLogger(__name__)

_NUM_CHECKED_TOKENS = 8
# Largest difference of the logits, by their norm. Two orders of sums differ by far less, a forgotten scale by far more.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}

# Of all layers' rounding; unrelated logits differ by more than 1.
_INT8_TOLERANCE = 0.2


def choose_backend(
    settings: EngineSettings, loaded: LoadedModel, kernels: Kernels, group: WorkerGroup | None
) -> ModelBackend:
    """The backend that --model-impl asks for. Raises StartupError."""
    probed = TransformersBackend(settings.model, loaded)
    if settings.model_impl == "transformers":
        if settings.quantization != "none":
            raise StartupError("--quantization int8 needs the native decoder, not --model-impl transformers")
        return probed
    options = _linear_options(settings, kernels)
    reason = reason_against(loaded, probed.is_causal)
    if not reason:
        reduce = group.sum_over_shards if group is not None and group.place.tensor_parallel_size > 1 else None
        expected = _transformers_logits(probed, loaded)
        native = NativeDecoder(loaded, probed, kernels, reduce, options)
        tolerance = _TOLERANCES[loaded.dtype] if options.int8 is None else _INT8_TOLERANCE
        reason = _disagreement(native, loaded, expected, tolerance)
        if not reason:
            weights = "int8 weights and " if options.int8 is not None else ""
            logger.info("%s is computed by the native decoder with %s%s kernels", settings.model, weights, kernels.name)
            return native
        native.unpack()
    flag = _flag_that_needs_it(settings)
    if flag:
        raise StartupError(f"{flag}: {settings.model} can not be computed by it: {reason}")
    logger.warning("%s is computed by transformers, which is slower. Not native: %s", settings.model, reason)
    return probed


def _flag_that_needs_it(settings: EngineSettings) -> str:
    if settings.model_impl == "native":
        return "--model-impl native"
    if settings.batch_invariant:
        return "--batch-invariant needs the native decoder"
    return "--quantization int8 needs the native decoder" if settings.quantization == "int8" else ""


def _linear_options(settings: EngineSettings, kernels: Kernels) -> LinearOptions:
    if settings.quantization == "int8":
        if not isinstance(kernels, CpuKernels) or kernels.int8 is None:
            raise StartupError(
                f"--quantization int8 needs a CPU with AVX-512 VNNI and its compiled kernels; here are {kernels.name}"
            )
        return LinearOptions(int8=kernels.int8)
    if not settings.batch_invariant:
        return LinearOptions(few_rows=kernels.few_rows if isinstance(kernels, CpuKernels) else None)
    # Here, because it imports triton.
    from engine_core.model_executor.kernels.triton_linear import invariant_linear

    return LinearOptions(multiply=invariant_linear)


def _token_ids(loaded: LoadedModel, vocab_size: int) -> torch.Tensor:
    return torch.arange(1, _NUM_CHECKED_TOKENS + 1, device=loaded.device) * 7919 % vocab_size


@torch.inference_mode()
def _transformers_logits(backend: TransformersBackend, loaded: LoadedModel) -> torch.Tensor:
    positions = torch.arange(_NUM_CHECKED_TOKENS, device=loaded.device)
    return backend.forward(_token_ids(loaded, backend.vocab_size), positions, positions, LayerProbe())


@torch.inference_mode()
def _disagreement(native: NativeDecoder, loaded: LoadedModel, expected: torch.Tensor, tolerance: float) -> str:
    """What is wrong with the native decoder's logits of the same tokens, in a cache of its own; empty if nothing."""
    positions = np.arange(_NUM_CHECKED_TOKENS)
    metadata = build_attention_metadata(
        query_start_loc=np.array([0, _NUM_CHECKED_TOKENS]),
        seq_lens=np.array([_NUM_CHECKED_TOKENS]),
        prompt_lens=np.array([_NUM_CHECKED_TOKENS]),
        block_tables=np.zeros((1, 1), dtype=np.int64),
        slot_mapping=positions,
        block_size=_NUM_CHECKED_TOKENS,
        device=loaded.device,
    )
    caches = {
        index: LayerKVCache(spec, 1, _NUM_CHECKED_TOKENS, loaded.dtype, loaded.device)
        for index, spec in native.layer_specs.items()
    }
    on_device = torch.from_numpy(positions).to(loaded.device)
    context = PagedAttention(caches, dict.fromkeys(caches, metadata))
    try:
        logits = native.forward(_token_ids(loaded, native.vocab_size), on_device, on_device, context)
    except (RuntimeError, IndexError) as error:
        # A check of a kernel, or of torch.
        return f"a failure on a few tokens ({error})"
    difference = float((logits.float() - expected.float()).norm() / expected.float().norm())
    # A comparison that is false for NaN too.
    is_equal = difference <= tolerance
    return "" if is_equal else f"logits that differ from transformers' by {difference:.1%}"
