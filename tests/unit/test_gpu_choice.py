"""Which kernels the flags choose, and what is said where they can not be had."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.kernels.choice import choose_kernels
from engine_core.model_executor.kernels.gpu_choice import choose_gpu_kernels, require_invariance
from engine_core.model_executor.startup_error import StartupError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    def hide(package: str) -> None:
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))

    return hide


def test_torch_is_to_be_had_everywhere():
    settings = EngineSettings(attention_backend="torch")
    assert choose_kernels(settings, CPU, torch.float32).name == "torch"
    assert choose_kernels(settings, GPU, torch.bfloat16).name == "torch"


def test_triton_serves_on_a_cpu_in_its_interpreter_only(monkeypatch: pytest.MonkeyPatch):
    triton = pytest.importorskip("triton", reason="needs triton: pip install triton")
    settings = EngineSettings(attention_backend="triton")
    assert choose_kernels(settings, CPU, torch.float32).name == "triton"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(StartupError, match="triton needs a GPU"):
        choose_kernels(settings, CPU, torch.float32)


def test_without_triton_torch_serves_with_a_warning(without, caplog: pytest.LogCaptureFixture):
    without("triton")
    assert choose_gpu_kernels(EngineSettings(), GPU, torch.bfloat16).name == "torch"
    assert "triton is not installed" in caplog.text
    with pytest.raises(StartupError, match="pip install triton"):
        choose_gpu_kernels(EngineSettings(attention_backend="triton"), GPU, torch.bfloat16)
    with pytest.raises(StartupError, match="pip install triton"):
        choose_gpu_kernels(EngineSettings(batch_invariant=True), GPU, torch.bfloat16)


def test_flashinfer_says_what_it_needs(without):
    settings = EngineSettings(attention_backend="flashinfer")
    without("flashinfer")
    with pytest.raises(StartupError, match="pip install flashinfer-python"):
        choose_gpu_kernels(settings, GPU, torch.bfloat16)
    with pytest.raises(StartupError, match="--dtype bfloat16 or float16"):
        choose_gpu_kernels(settings, GPU, torch.float32)
    with pytest.raises(StartupError, match="flashinfer needs a GPU"):
        choose_gpu_kernels(settings, CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "settings", "reason"),
    [
        (CPU, {}, "needs a GPU"),
        (GPU, {"attention_backend": "torch"}, "--attention-backend torch"),
        (GPU, {"attention_backend": "flashinfer"}, "--attention-backend flashinfer"),
        (GPU, {"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        (GPU, {"model_impl": "transformers"}, "--model-impl transformers"),
    ],
)
def test_batch_invariance_is_refused_where_it_could_not_be_kept(device, settings, reason):
    with pytest.raises(StartupError, match=reason):
        require_invariance(EngineSettings(batch_invariant=True, **settings), device)
    require_invariance(EngineSettings(**settings), device)


def test_batch_invariance_with_triton_is_accepted():
    require_invariance(EngineSettings(batch_invariant=True), GPU)
    with pytest.raises(StartupError, match="needs a GPU"):
        choose_kernels(EngineSettings(batch_invariant=True), CPU, torch.float32)
