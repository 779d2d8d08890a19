"""Loading a model directory: what is loaded, and what is said when it can not be."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine_core.config import EngineSettings
from engine_core.model_executor import loader
from engine_core.model_executor.checkpoint import checkpoint_files, num_parameters, read_headers
from engine_core.model_executor.loader import LoadedModel, choose_device, load_model
from engine_core.model_executor.models.transformers_backend import TransformersBackend
from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.startup_error import StartupError
from fakes.one_process_group import OneProcessGroup
from fakes.tiny_models import save_tiny_model, tiny_configs


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("loader") / "llama", tiny_configs()["llama"])


@pytest.fixture
def model_dir(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "llama")


def load(path, **settings) -> LoadedModel:
    return load_model(EngineSettings(model="m", device="cpu", **settings), path, lambda _: None)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_dtype(saved, dtype, expected):
    loaded = load(saved, dtype=dtype)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {expected}
    assert not loaded.module.training
    num_parameters = sum(tensor.numel() for tensor in load_file(saved / "model.safetensors").values())
    assert loaded.weight_bytes == num_parameters * expected.itemsize


def test_probe_finds_the_layers_and_the_vocabulary(saved):
    backend = TransformersBackend("m", load(saved))
    assert backend.vocab_size == 211
    assert [(spec.num_kv_heads, spec.key_dim, spec.value_dim) for spec in backend.layer_specs.values()] == [
        (2, 8, 8)
    ] * 3


def test_cuda_where_there_is_none(saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="--device cuda: torch sees no CUDA device"):
        load_model(EngineSettings(device="cuda"), saved, lambda _: None)


def test_too_little_memory_is_said_before_loading(saved, monkeypatch):
    monkeypatch.setattr(loader, "available_bytes", lambda: 1000)
    monkeypatch.setattr(loader, "_load_module", lambda *_: pytest.fail("loaded all the same"))
    with pytest.raises(StartupError, match=r"--model m: the weights need .* GiB of memory in float32"):
        load(saved)


def test_each_worker_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    settings = EngineSettings()
    assert choose_device(settings) == torch.device("cuda")
    assert [choose_device(settings, Place(rank, 2, 2)) for rank in range(4)] == [
        torch.device("cuda", rank) for rank in range(4)
    ]
    assert choose_device(EngineSettings(device="cpu"), Place(3, 2, 2)) == torch.device("cpu")
    with pytest.raises(StartupError, match=r"--tensor-parallel-size 2 .* needs 6 CUDA devices; torch sees 4"):
        choose_device(settings, Place(0, 2, 3))


def test_a_worker_loads_its_part_alone_but_all_weights_have_to_fit_for_a_moment(saved, monkeypatch):
    settings = EngineSettings(model="m", device="cpu", tensor_parallel_size=2, pipeline_parallel_size=3)
    group = OneProcessGroup(Place(5, 2, 3), [torch.zeros(1, 2, 32)])
    whole, part = load(saved), load_model(settings, saved, lambda _: None, group)
    assert (whole.layers, part.layers) == (range(3), range(2, 3))
    assert part.weight_bytes < whole.weight_bytes / 2
    monkeypatch.setattr(loader, "available_bytes", lambda: 5 * whole.weight_bytes)
    with pytest.raises(StartupError, match="the weights need"):
        load_model(settings, saved, lambda _: None, group)


def test_shards_are_counted_and_other_weight_files_are_not(saved, tmp_path):
    # Repositories may hold the same weights a second time under a name that is not loaded.
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(tmp_path, max_shard_size="20KB")
    shutil.copy(saved / "model.safetensors", tmp_path / "consolidated.safetensors")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    tensors = load_file(saved / "model.safetensors")
    assert num_parameters(read_headers(checkpoint_files(tmp_path))) == sum(
        tensor.numel() for tensor in tensors.values()
    )


def test_a_missing_shard(saved, tmp_path):
    AutoModelForCausalLM.from_pretrained(saved).save_pretrained(tmp_path, max_shard_size="20KB")
    next(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(StartupError, match="--model m: its weights can not be read"):
        load(tmp_path)


def test_missing_weights_are_not_replaced_by_random_ones(model_dir):
    tensors = load_file(model_dir / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartupError, match=r"lacks weights, model\.layers\.1\.mlp\.up_proj\.weight among them"):
        load(model_dir)


def test_damaged_weights(model_dir):
    (model_dir / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(StartupError, match="--model m: its weights can not be read"):
        load(model_dir)


@pytest.mark.parametrize(
    "content",
    ["not json", "{}", '{"model_type": "never-heard-of"}', '{"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}'],
)
def test_unusable_config(model_dir, content):
    (model_dir / "config.json").write_text(content)
    with pytest.raises(StartupError, match=r"--model m: config\.json can not be used"):
        load(model_dir)


def test_shapes_that_differ_from_the_config(model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    with pytest.raises(StartupError, match="--model m: can not be loaded"):
        load(model_dir)
