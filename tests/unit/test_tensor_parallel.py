"""A layer cut into shards computes what the whole layer computes, and what can not be cut is refused by name."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.parallel.tensor_parallel import require_shardable, shard
from engine_core.model_executor.startup_error import StartupError
from fakes.one_process_group import OneProcessGroup
from fakes.tiny_models import load_reference, save_tiny_model, tiny_configs

SIZE = 2


@pytest.fixture(scope="module")
def config():
    return LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
    )


def model_of(config) -> torch.nn.Module:
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return module.eval()


def shards_of(config) -> list[torch.nn.Module]:
    modules = [model_of(config) for _ in range(SIZE)]
    for rank, module in enumerate(modules):
        shard(module, config, OneProcessGroup(Place(rank, SIZE, 1)))
    return modules


@torch.inference_mode()
def test_columns_side_by_side_and_rows_in_a_sum_are_the_whole(config):
    whole, parts = model_of(config), shards_of(config)
    for name, layer in whole.named_modules():
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        inputs = torch.randn(3, layer.in_features)
        pieces = [part.get_submodule(name) for part in parts]
        if pieces[0].in_features == layer.in_features:
            output = torch.cat([piece(inputs) for piece in pieces], dim=-1)
        else:
            own_inputs = inputs.chunk(SIZE, dim=-1)
            output = sum(piece(own) for piece, own in zip(pieces, own_inputs, strict=True))
        torch.testing.assert_close(output, layer(inputs))


def test_a_shard_holds_its_part_alone(config):
    whole, (first, second) = model_of(config), shards_of(config)
    for part in (first, second):
        assert part.lm_head.weight.shape == whole.lm_head.weight.shape
        for name, layer in part.model.layers[0].named_modules():
            if isinstance(layer, torch.nn.Linear):
                cut = layer.weight
                assert cut.numel() == whole.model.layers[0].get_submodule(name).weight.numel() / SIZE
                # Not a view of the whole matrix.
                assert cut.untyped_storage().nbytes() == cut.nbytes


def test_the_sum_runs_over_the_shards(config, monkeypatch):
    module = model_of(config)
    group = OneProcessGroup(Place(0, SIZE, 1))
    monkeypatch.setattr(group, "sum_over_shards", lambda tensor: torch.full_like(tensor, 7))
    shard(module, config, group)
    layer = module.model.layers[1].mlp.down_proj
    assert torch.equal(layer(torch.zeros(2, 12)), torch.full((2, 16), 7.0))


class ThreadedGroup(OneProcessGroup):
    """A shard in a thread of its own; the sums are real."""

    def __init__(self, rank: int, summands: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        super().__init__(Place(rank, SIZE, 1))
        self._summands = summands
        self._barrier = barrier

    def sum_over_shards(self, tensor: torch.Tensor) -> torch.Tensor:
        self._summands[self.place.rank] = tensor
        self._barrier.wait()
        total = sum(self._summands)
        self._barrier.wait()
        return total


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_the_shards_of_every_family_compute_what_the_whole_computes(name, tmp_path):
    config = tiny_configs()[name]
    require_shardable("m", config, SIZE)
    directory = save_tiny_model(tmp_path, config)
    input_ids = torch.randint(3, 200, (1, 9), generator=torch.Generator().manual_seed(1))
    summands: list[torch.Tensor | None] = [None] * SIZE
    barrier = threading.Barrier(SIZE, timeout=60)
    modules = [load_reference(directory) for _ in range(SIZE)]
    for rank, module in enumerate(modules):
        shard(module, config, ThreadedGroup(rank, summands, barrier))

    def run(module: torch.nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            return module(input_ids, use_cache=False).logits

    with ThreadPoolExecutor(SIZE) as threads:
        outputs = list(threads.map(run, modules))
    expected = run(load_reference(directory))
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(size):
    config = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    require_shardable("m", config, 1)
    require_shardable("m", config, 3)
    with pytest.raises(StartupError, match=rf"--tensor-parallel-size {size} .* 3 key/value heads.*possible are 1, 3$"):
        require_shardable("m", config, size)


def test_a_plan_that_is_not_understood_is_refused():
    for name in ("phi3", "gpt_oss"):
        with pytest.raises(StartupError, match=f"architecture {name} can not be cut: its plan has"):
            require_shardable("m", tiny_configs()[name], 2)


def test_a_model_without_a_plan_is_refused(config):
    class Unplanned(LlamaConfig):
        base_model_tp_plan = None

    with pytest.raises(StartupError, match="it has no plan"):
        require_shardable("m", Unplanned(**config.to_dict()), 2)
