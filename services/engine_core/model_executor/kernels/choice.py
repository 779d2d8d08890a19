"""Which set of kernels serves: by device, type, setting, and what this machine and its compiler can do.

Used once, by the thread that starts the engine or a worker.
"""

from __future__ import annotations

import logging

import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.kernels.cpu_build import BuildError
from engine_core.model_executor.kernels.cpu_kernels import CpuKernels
from engine_core.model_executor.kernels.cpu_library import available_sets, load_operators
from engine_core.model_executor.kernels.gpu_choice import choose_gpu_kernels, require_invariance
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.kernels.torch_kernels import TorchKernels
from engine_core.model_executor.startup_error import StartupError

logger = logging.getLogger(__name__)


def choose_kernels(settings: EngineSettings, device: torch.device, dtype: torch.dtype) -> Kernels:
    """An explicit --cpu-kernels that can not be had is a StartupError; with auto the torch kernels take its place."""
    require_invariance(settings, device)
    if device.type != "cpu" or settings.attention_backend != "auto":
        return choose_gpu_kernels(settings, device, dtype)
    if settings.cpu_kernels == "torch":
        return TorchKernels()
    if dtype not in (torch.float32, torch.bfloat16):
        logger.warning("the CPU kernels have no %s: attention runs in plain torch, which is slower", dtype)
        return TorchKernels()
    try:
        return _cpu_kernels(settings.cpu_kernels)
    except BuildError as error:
        if settings.cpu_kernels != "auto":
            raise StartupError(f"--cpu-kernels {settings.cpu_kernels}: {error}") from error
        logger.warning("no CPU kernels: %s. Attention runs in plain torch, which is slower", error)
        return TorchKernels()


def _cpu_kernels(wanted: str) -> CpuKernels:
    operators = load_operators(logger.info)
    available = available_sets(operators)
    if wanted == "auto":
        return CpuKernels(operators, available[0])
    if wanted not in available:
        raise StartupError(f"--cpu-kernels {wanted}: this CPU lacks the instructions; it has {', '.join(available)}")
    return CpuKernels(operators, wanted)
