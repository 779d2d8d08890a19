"""Weights of a real module: replaced, updated, dropped and loaded again, in place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig

from engine_core.config import EngineSettings
from engine_core.model_executor.executor import ExecutorFailedError, WeightTensor
from engine_core.model_executor.loader import LoadedModel, load_model
from engine_core.model_executor.model_weights import ModelWeights
from engine_core.model_executor.startup_error import StartupError
from fakes.tiny_models import save_tiny_model, tiny_configs

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# A buffer that is saved.
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    config = tiny_configs()["llama"]
    return save_tiny_model(root / "one", config, seed=0), save_tiny_model(root / "two", config, seed=1)


def load(directory: Path) -> LoadedModel:
    return load_model(EngineSettings(model="m", device="cpu"), directory, lambda _: None)


@pytest.fixture
def loaded(directories: tuple[Path, Path]) -> LoadedModel:
    return load(directories[0])


@pytest.fixture(scope="module")
def moe_directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("moe")
    return save_biased_moe(root / "one", seed=0), save_biased_moe(root / "two", seed=1)


def save_biased_moe(directory: Path, seed: int) -> Path:
    """Experts whose correction bias, zeros in a new model, differs too."""
    config = Glm4MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
    )
    file = save_tiny_model(directory, config, seed) / "model.safetensors"
    save_file({**load_file(file), BIAS: torch.rand(4) + seed}, file, metadata={"format": "pt"})
    return directory


def state_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in loaded.module.state_dict().items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def is_tied(loaded: LoadedModel) -> bool:
    module = loaded.module
    is_shared = module.lm_head.weight is module.model.embed_tokens.weight
    return is_shared and module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()


def changed(directories: tuple[Path, Path], target: Path, **changes: torch.Tensor | None) -> Path:
    """The second checkpoint with some tensors replaced, added or, None, left out."""
    target.mkdir()
    tensors: dict = {**load_file(directories[1] / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_all_weights_are_replaced_in_place_and_stay_tied(loaded: LoadedModel, directories) -> None:
    pointers = [parameter.data_ptr() for parameter in loaded.module.parameters()]
    weights = ModelWeights(loaded)
    num_bytes = weights.load(directories[1])
    assert num_bytes == loaded.weight_bytes
    assert_equal(state_of(loaded), state_of(load(directories[1])))
    assert is_tied(loaded)
    assert [parameter.data_ptr() for parameter in loaded.module.parameters()] == pointers


@pytest.mark.parametrize("is_discarded", [False, True])
def test_buffers_of_the_checkpoint_are_replaced_too(moe_directories, is_discarded: bool) -> None:
    loaded, other = load(moe_directories[0]), load(moe_directories[1])
    weights = ModelWeights(loaded)
    if is_discarded:
        weights.discard()
    num_bytes = weights.load(moe_directories[1])
    assert_equal(state_of(loaded), state_of(other))
    assert num_bytes == sum(tensor.nbytes for tensor in state_of(other).values())


def test_the_checkpoints_own_configuration_does_not_count(loaded: LoadedModel, directories, tmp_path: Path) -> None:
    other = changed(directories, tmp_path / "other")
    for config in (None, {"model_type": "gpt2"}):
        if config:
            (other / "config.json").write_text(json.dumps(config))
        ModelWeights(loaded).load(other)
        assert_equal(state_of(loaded), state_of(load(directories[1])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: torch.ones(31)}, "can not be loaded"),
        ({NORM: None}, "lacks weights, model.norm.weight among them"),
        # Not tied any more: the running model has one weight for both.
        ({HEAD: torch.zeros(211, 32)}, "lm_head.weight is of shape .*, and missing in the running model"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    loaded: LoadedModel, directories, tmp_path: Path, changes: dict, message: str
) -> None:
    before = state_of(loaded)
    with pytest.raises(StartupError, match=message):
        ModelWeights(loaded).load(changed(directories, tmp_path / "other", **changes))
    assert_equal(state_of(loaded), before)


def test_a_failure_in_the_middle_says_so(loaded: LoadedModel, directories, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ModelWeights, other: torch.nn.Module) -> int:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(ModelWeights, "_take_over", fail)
    with pytest.raises(ExecutorFailedError, match="the device is lost"):
        ModelWeights(loaded).load(directories[1])


def test_discarded_weights_take_no_memory_and_come_back_tied(loaded: LoadedModel, directories) -> None:
    before, expected_bytes = state_of(loaded), loaded.weight_bytes
    weights = ModelWeights(loaded)
    assert weights.discard() == expected_bytes
    assert sum(parameter.nbytes for parameter in loaded.module.parameters()) == 0
    assert weights.discard() == 0
    assert weights.shapes[EMBED] == (211, 32)
    assert weights.load(directories[0]) == expected_bytes
    assert_equal(state_of(loaded), before)
    assert is_tied(loaded)


@pytest.mark.parametrize("is_restored", [False, True])
@pytest.mark.parametrize("family", ["directories", "moe_directories"])
def test_a_file_that_is_overwritten_has_no_effect(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, is_restored: bool
) -> None:
    own = shutil.copytree(request.getfixturevalue(family)[0], tmp_path / "own")
    loaded = load(own)
    before = state_of(loaded)
    if is_restored:
        weights = ModelWeights(loaded)
        weights.discard()
        weights.load(own)
    # In place, as a trainer does that saves over its last checkpoint.
    with (own / "model.safetensors").open("r+b") as file:
        file.write(bytes(file.seek(0, 2) - file.seek(0)))
    assert_equal(state_of(loaded), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_some_weights_are_overwritten_in_their_own_type(loaded: LoadedModel, dtype: torch.dtype) -> None:
    before = state_of(loaded)
    values = torch.randn(211, 32).to(dtype)
    data = bytearray(values.view(torch.uint8).numpy().tobytes())
    ModelWeights(loaded).update([WeightTensor(EMBED, str(dtype).removeprefix("torch."), (211, 32), data)])
    assert_equal(state_of(loaded), {**before, EMBED: values.float(), HEAD: values.float()})
    assert is_tied(loaded)


def test_tied_weights_have_one_name(loaded: LoadedModel) -> None:
    shapes = ModelWeights(loaded).shapes
    assert EMBED in shapes
    assert HEAD not in shapes
    assert np.prod(shapes[EMBED]) == 211 * 32


def test_a_buffer_of_the_checkpoint_is_a_weight(moe_directories) -> None:
    loaded = load(moe_directories[0])
    weights, before = ModelWeights(loaded), state_of(loaded)
    assert weights.shapes.keys() == before.keys()
    assert weights.shapes[BIAS] == (4,)
    values = torch.arange(4.0)
    weights.update([WeightTensor(BIAS, "float32", (4,), bytearray(values.numpy().tobytes()))])
    assert_equal(state_of(loaded), {**before, BIAS: values})


def test_a_weight_without_values_is_passed_over(loaded: LoadedModel) -> None:
    loaded.module.register_parameter("none", torch.nn.Parameter(torch.empty(0, 3)))
    weights = ModelWeights(loaded)
    ones = bytearray(np.ones(32, np.float32).tobytes())
    weights.update([WeightTensor("none", "float32", (0, 3), bytearray()), WeightTensor(NORM, "float32", (32,), ones)])
    assert torch.equal(loaded.module.get_parameter(NORM), torch.ones(32))
