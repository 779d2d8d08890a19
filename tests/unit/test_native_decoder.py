"""The native decoder beside what it takes its weights from: when it serves, and what happens when weights change.

That it computes what transformers computes is shown family by family in tests/e2e/test_model_runner_vs_transformers.py.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import build_attention_metadata
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.executor import WeightTensor
from engine_core.model_executor.kernels.choice import choose_kernels
from engine_core.model_executor.kernels.cpu_build import INSTRUCTION_SETS
from engine_core.model_executor.kernels.cpu_library import available_sets, load_operators
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.kernels.torch_kernels import TorchKernels
from engine_core.model_executor.loader import LoadedModel, load_model
from engine_core.model_executor.models import decoder as decoder_module
from engine_core.model_executor.models.backend import ModelBackend
from engine_core.model_executor.models.choice import choose_backend
from engine_core.model_executor.models.linear import FusedLinear
from engine_core.model_executor.startup_error import StartupError
from fakes.tiny_models import load_reference, save_tiny_model, tiny_configs
from skips import require_program
from stepwire.errors import InvariantViolation

NUM_TOKENS = 6
EMBED, QUERY = "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> tuple[Path, Path]:
    root, config = tmp_path_factory.mktemp("native"), tiny_configs()["llama"]
    return save_tiny_model(root / "one", config, seed=0), save_tiny_model(root / "two", config, seed=1)


def load(directory: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(EngineSettings(model="m", device="cpu", dtype=dtype), directory, lambda _: None)


def choose(loaded: LoadedModel, model_impl: str = "auto", kernels: TorchKernels | None = None) -> ModelBackend:
    settings = EngineSettings(model="m", device="cpu", model_impl=model_impl)
    return choose_backend(settings, loaded, kernels or TorchKernels(), None)


@torch.inference_mode()
def logits_of(backend: ModelBackend) -> torch.Tensor:
    """Of a prompt of a few tokens."""
    positions = np.arange(NUM_TOKENS)
    metadata = build_attention_metadata(
        query_start_loc=np.array([0, NUM_TOKENS]),
        seq_lens=np.array([NUM_TOKENS]),
        prompt_lens=np.array([NUM_TOKENS]),
        block_tables=np.array([[1]]),
        slot_mapping=positions + 16,
        block_size=16,
        device=torch.device("cpu"),
    )
    specs = backend.layer_specs.items()
    caches = {index: LayerKVCache(spec, 2, 16, torch.float32, torch.device("cpu")) for index, spec in specs}
    on_device = torch.from_numpy(positions)
    return backend.forward(on_device + 5, on_device, on_device, PagedAttention(caches, dict.fromkeys(caches, metadata)))


@torch.inference_mode()
def expected_of(module: torch.nn.Module) -> torch.Tensor:
    return module(torch.arange(NUM_TOKENS)[None] + 5).logits[0]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def weight_tensor(name: str, tensor: torch.Tensor) -> WeightTensor:
    return WeightTensor(name, "float32", tuple(tensor.shape), bytearray(tensor.numpy().tobytes()))


@pytest.mark.parametrize("model_impl", ["auto", "native"])
def test_it_is_chosen_for_what_it_can_compute(directories, model_impl):
    backend = choose(load(directories[0]), model_impl)
    assert backend.name == "native"
    assert_close(logits_of(backend), expected_of(load_reference(directories[0])))


def test_logits_of_further_positions_need_no_other_pass(directories):
    backend = choose(load(directories[0]))
    everything = logits_of(backend)
    with torch.inference_mode():
        torch.testing.assert_close(backend.logits(torch.tensor([4, 1])), everything[[4, 1]])


class WrongKernels(TorchKernels):
    """Forget what was in the residual stream."""

    def add_rms_norm(self, residual, x, weight, eps, out):
        if x is not None:
            residual.zero_()
        super().add_rms_norm(residual, x, weight, eps, out)


def test_one_that_disagrees_with_transformers_does_not_serve(directories, caplog):
    loaded = load(directories[0])
    with caplog.at_level("WARNING"):
        backend = choose(loaded, kernels=WrongKernels())
    assert backend.name == "transformers"
    assert "logits that differ from transformers'" in caplog.text
    # With the weights it had been given away.
    assert_close(logits_of(backend), expected_of(load_reference(directories[0])))
    with pytest.raises(StartupError, match="--model-impl native: m can not be computed by it: logits that differ"):
        choose(load(directories[0]), "native", WrongKernels())


def test_weights_are_not_held_twice(directories):
    loaded = load(directories[0])
    choose(loaded)
    left = {name for name, parameter in loaded.module.named_parameters() if parameter.numel()}
    assert left == {EMBED, "model.norm.weight"} | {
        f"model.layers.{index}.{name}_layernorm.weight" for index in range(3) for name in ("input", "post_attention")
    }
    assert loaded.weight_bytes == sum(parameter.nbytes for parameter in load_reference(directories[0]).parameters())


@pytest.mark.parametrize("name", [EMBED, QUERY, NORM])
def test_an_updated_weight_takes_effect(directories, name):
    """The embedding is the output matrix too; a query matrix is a part of a packed one; a norm is kept as float32."""
    backend, reference = choose(load(directories[0])), load_reference(directories[0])
    before = logits_of(backend)
    weight = dict(reference.named_parameters())[name]
    value = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * 0.3
    weight.data.copy_(value)
    backend.weights.update([weight_tensor(name, value)])
    assert_close(logits_of(backend), expected_of(reference))
    assert not torch.allclose(logits_of(backend), before, atol=1e-2)


@pytest.mark.parametrize("is_discarded", [False, True])
def test_other_weights_are_loaded_over_these_or_after_they_were_dropped(directories, is_discarded):
    loaded = load(directories[0])
    backend = choose(loaded)
    num_bytes = loaded.weight_bytes
    if is_discarded:
        assert backend.weights.discard() == num_bytes
        assert backend.weights.discard() == 0
    assert backend.weights.load(directories[1]) == num_bytes
    assert_close(logits_of(backend), expected_of(load_reference(directories[1])))


def test_nothing_changes_when_other_weights_do_not_fit(directories, tmp_path):
    backend = choose(load(directories[0]))
    with pytest.raises(StartupError):
        backend.weights.load(save_tiny_model(tmp_path, tiny_configs()["qwen3"]))
    assert_close(logits_of(backend), expected_of(load_reference(directories[0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_products_and_their_way_back(dtype):
    """bfloat16 and float32 are packed where oneDNN does it; float16 is not."""
    parts = [torch.nn.Linear(12, size, dtype=dtype) for size in (5, 3, 3)]
    weights = [part.weight.detach().clone() for part in parts]
    x = torch.randn(4, 12).to(dtype)
    expected = torch.cat([torch.nn.functional.linear(x, part.weight, part.bias) for part in parts], dim=-1)
    with torch.inference_mode():
        linear = FusedLinear(parts)
        torch.testing.assert_close(linear(x), expected, rtol=2e-2, atol=2e-2)
    linear.unpack()
    for part, weight in zip(parts, weights, strict=True):
        assert torch.equal(part.weight, weight)


def test_a_product_is_summed_over_the_workers_that_share_it():
    part = torch.nn.Linear(4, 4, bias=False)
    expected = 2 * part(torch.ones(1, 4))
    assert_close(FusedLinear([part], reduce=lambda product: product.mul_(2))(torch.ones(1, 4)), expected)


class FailingKernels(TorchKernels):
    def act_mul(self, gate_up, activation, out):
        raise RuntimeError("no such instruction")


def test_one_that_fails_does_not_serve(directories, caplog):
    with caplog.at_level("WARNING"):
        backend = choose(load(directories[0]), kernels=FailingKernels())
    assert backend.name == "transformers"
    assert "a failure on a few tokens (no such instruction)" in caplog.text
    assert_close(logits_of(backend), expected_of(load_reference(directories[0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_lets_go_of_weights_that_were_given_back(dtype):
    part = torch.nn.Linear(8, 8, bias=False, dtype=dtype)
    linear = FusedLinear([part])
    held = weakref.ref(linear._packed if linear._packed is not None else part.weight.data)
    linear.unpack()
    part.weight.data = torch.empty(0)
    assert held() is None
    with pytest.raises(InvariantViolation, match="given back"):
        linear(torch.ones(1, 8, dtype=dtype))


def test_nothing_is_computed_while_the_weights_are_out_of_use(directories):
    backend = choose(load(directories[0]))
    backend.weights.discard()
    with pytest.raises(InvariantViolation, match="out of use"):
        logits_of(backend)


def test_a_way_back_that_failed_is_gone_again(directories, monkeypatch):
    """The weights are on their device, and packing them fails for want of memory."""
    backend = choose(load(directories[0]))
    backend.unpack()
    with monkeypatch.context() as patch:
        patch.setattr(decoder_module, "make_layer", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            backend.move_weights(torch.device("cpu"))
    with pytest.raises(InvariantViolation):
        logits_of(backend)
    backend.move_weights(torch.device("cpu"))
    assert_close(logits_of(backend), expected_of(load_reference(directories[0])))


def choose_int8(loaded: LoadedModel, model_impl: str = "auto", kernels: Kernels | None = None) -> ModelBackend:
    settings = EngineSettings(model="m", device="cpu", model_impl=model_impl, quantization="int8")
    return choose_backend(settings, loaded, kernels or choose_kernels(settings, loaded.device, loaded.dtype), None)


@pytest.fixture
def has_int8() -> None:
    require_program("c++", "g++", "clang++", how="apt-get install g++")
    operators = load_operators(lambda _: None)
    if not operators.has_int8(INSTRUCTION_SETS.index(available_sets(operators)[0])):
        pytest.skip("needs a CPU with AVX-512 VNNI")


@pytest.mark.instructions
def test_int8_is_near_and_an_update_replaces_what_it_names(directories, has_int8):
    loaded, reference = load(directories[0]), load_reference(directories[0])
    backend = choose_int8(loaded)
    before = logits_of(backend)
    expected = expected_of(reference)
    assert 1e-4 * expected.norm() < (before - expected).norm() < 0.05 * expected.norm()
    # The embedding is the output matrix too, and stays as it is.
    assert torch.equal(loaded.module.get_input_embeddings().weight, reference.get_input_embeddings().weight)
    norm = dict(reference.named_parameters())[NORM].data
    backend.weights.update([weight_tensor(NORM, norm)])
    assert torch.equal(logits_of(backend), before)
    value = torch.randn(dict(reference.named_parameters())[QUERY].shape, generator=torch.Generator().manual_seed(3))
    dict(reference.named_parameters())[QUERY].data.copy_(value)
    backend.weights.update([weight_tensor(QUERY, value)])
    changed = expected_of(reference)
    assert (logits_of(backend) - changed).norm() < 0.05 * changed.norm() < (before - changed).norm()


@pytest.mark.instructions
def test_int8_weights_that_are_discarded_leave_nothing_behind(directories, has_int8):
    loaded = load(directories[0])
    kernels = choose_kernels(EngineSettings(model="m", device="cpu"), loaded.device, loaded.dtype)
    backend = choose_int8(loaded, kernels=kernels)
    backend.weights.discard()
    assert kernels.int8.given_back == {}
    backend.weights.load(directories[1])
    expected = expected_of(load_reference(directories[1]))
    assert (logits_of(backend) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.instructions
def test_int8_where_it_can_not_be_done_is_an_error(directories, has_int8):
    with pytest.raises(StartupError, match="needs the native decoder, not --model-impl transformers"):
        choose_int8(load(directories[0]), "transformers")
    with pytest.raises(StartupError, match="needs a CPU with AVX-512 VNNI and its compiled kernels; here are torch"):
        choose_int8(load(directories[0]), kernels=TorchKernels())
    loaded = load(directories[0])
    loaded.module.model.layers[0].self_attn.unknown = torch.nn.Linear(4, 4)
    with pytest.raises(StartupError, match="--quantization int8 needs the native decoder: m can not be computed by it"):
        choose_int8(loaded)


def test_a_decoder_that_nobody_wants_any_more_is_gone_at_once(directories):
    backend = choose(load(directories[0]))
    held = weakref.ref(backend)
    del backend
    assert held() is None
