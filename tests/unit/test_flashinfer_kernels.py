"""What FlashInfer is told, and when: against a fake of its module that records the calls and computes what they mean.

FlashInfer itself was never run here: it needs a GPU.
"""

from __future__ import annotations

import sys

import pytest
import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.startup_error import StartupError
from fakes.fake_flashinfer import Calls, fake_flashinfer
from fakes.kernel_cases import Batch, Heads, check_paged_attention

pytest.importorskip("triton", reason="needs triton: pip install triton")

CPU = torch.device("cpu")
HEADS = Heads(6, 2, 64)
PLAIN = AttentionOptions(scale=0.125)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    module, calls = fake_flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    # Imports the module that is there at its first import.
    monkeypatch.delitem(sys.modules, "engine_core.model_executor.kernels.flashinfer_kernels", raising=False)
    return calls


@pytest.fixture
def kernels(calls: Calls):
    from engine_core.model_executor.kernels.flashinfer_kernels import FlashInferKernels

    return FlashInferKernels(1, CPU)


@pytest.mark.parametrize(
    "options", [PLAIN, AttentionOptions(scale=0.2, sliding_window=9), AttentionOptions(scale=0.2, softcap=3.0)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decodes_and_mixed_batches(kernels, calls: Calls, options: AttentionOptions, dtype: torch.dtype):
    check_paged_attention(kernels, Batch([(20, 1), (15, 1), (0, 1)], HEADS, dtype=dtype), options)
    check_paged_attention(kernels, Batch([(20, 1), (3, 30), (0, 16), (40, 1)], HEADS, dtype=dtype), options)
    assert [plan["kind"] for plan in calls.plans] == ["decode", "prefill"]


def test_one_plan_a_step_for_each_kind_of_layer(kernels, calls: Calls):
    """Layers of one kind share it, wherever others stand between them; the next step has its own."""
    windowed = AttentionOptions(scale=0.125, sliding_window=5)
    for seed in range(2):
        batch = Batch([(20, 1), (7, 1)], HEADS, dtype=torch.bfloat16, seed=seed)
        for options in (PLAIN, windowed, PLAIN, windowed, PLAIN):
            check_paged_attention(kernels, batch, options)
    assert [plan["window_left"] for plan in calls.plans] == [-1, 4, -1, 4]
    assert calls.num_runs == 10


def test_a_size_of_heads_it_does_not_know_is_refused(kernels):
    with pytest.raises(StartupError, match="heads of 64, 128, 256"):
        check_paged_attention(kernels, Batch([(3, 1)], Heads(2, 1, 80), dtype=torch.bfloat16), PLAIN)
