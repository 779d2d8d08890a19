"""Which kernels serve on a GPU: Triton's, FlashInfer's attention, or plain torch, by flag and by what is installed.

Used once, by the thread that starts the engine or a worker. triton and flashinfer are imported only when chosen.
"""

from __future__ import annotations

import importlib.util
import logging

import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.kernels.torch_kernels import TorchKernels
from engine_core.model_executor.startup_error import StartupError

logger = logging.getLogger(__name__)


def choose_gpu_kernels(settings: EngineSettings, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels of --attention-backend. Raises StartupError for one that can not be had."""
    wanted = settings.attention_backend
    if wanted == "torch":
        return TorchKernels()
    if device.type == "cpu" and (wanted == "flashinfer" or not _is_interpreted()):
        raise StartupError(f"--attention-backend {wanted} needs a GPU")
    if wanted == "flashinfer":
        return _flashinfer_kernels(device, dtype)
    if importlib.util.find_spec("triton") is None:
        if wanted == "auto" and not settings.batch_invariant:
            logger.warning("triton is not installed: attention runs in plain torch, which is slower")
            return TorchKernels()
        raise StartupError("--attention-backend triton: triton is not installed; pip install triton")
    # Here, because it takes a second and is not there on every machine.
    from engine_core.model_executor.kernels.triton_kernels import TritonKernels

    return TritonKernels(num_processors(device), is_batch_invariant=settings.batch_invariant)


def require_invariance(settings: EngineSettings, device: torch.device) -> None:
    """Raise StartupError where --batch-invariant could not be kept."""
    if not settings.batch_invariant:
        return
    if device.type != "cuda":
        # Measured: one row of a product of oneDNN or MKL differs in its last bits with the number of rows.
        raise StartupError(
            "--batch-invariant needs a GPU: matrix products on a CPU sum in an order that depends on the batch"
        )
    if settings.attention_backend not in ("auto", "triton"):
        raise StartupError(f"--batch-invariant is not to be had with --attention-backend {settings.attention_backend}")
    if settings.tensor_parallel_size > 1:
        raise StartupError("--batch-invariant is not to be had with --tensor-parallel-size: workers sum in any order")
    if settings.model_impl == "transformers":
        raise StartupError("--batch-invariant is not to be had with --model-impl transformers")


def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device; of a CPU, on which Triton only interprets, one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _is_interpreted() -> bool:
    """Whether Triton runs in its interpreter, for tests without a GPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _flashinfer_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    if dtype not in (torch.bfloat16, torch.float16):
        raise StartupError("--attention-backend flashinfer needs --dtype bfloat16 or float16")
    for package in ("flashinfer", "triton"):
        if importlib.util.find_spec(package) is None:
            name = "flashinfer-python" if package == "flashinfer" else package
            raise StartupError(f"--attention-backend flashinfer: {package} is not installed; pip install {name}")
    from engine_core.model_executor.kernels.flashinfer_kernels import FlashInferKernels

    return FlashInferKernels(num_processors(device), device)
