"""`stepwire size` computes what the engine finds out by loading the model, for every family it knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig
from typer.testing import CliRunner

from engine_core.config import EngineSettings
from engine_core.model_executor.in_process_executor import InProcessExecutor
from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.parallel.tensor_parallel import shard
from engine_core.resolved_config import ResolvedConfig, ServedModel, resolve_config
from fakes.one_process_group import OneProcessGroup
from fakes.tiny_models import save_tiny_model, tiny_configs
from stepwire_client.cli import app
from stepwire_client.sizing.model_shape import FAMILIES, SizingError, parse_shape, read_shape
from stepwire_client.sizing.size import GIB, Settings, size
from stepwire_client.sizing.weights import num_weights, num_weights_of_worker

_MOE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}
CONFIGS = {name: config for name, config in tiny_configs().items() if config.model_type in FAMILIES} | {
    "mixtral": MixtralConfig(**_MOE, intermediate_size=24, num_local_experts=3, sliding_window=None),
    "qwen3_moe": Qwen3MoeConfig(
        **_MOE, intermediate_size=40, moe_intermediate_size=8, num_experts=4, decoder_sparse_step=2, head_dim=8
    ),
}
# Dense and tied, windows of two kinds in groups of equal and of unequal sizes, one window alone, experts.
LOADED = ["llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt_oss"]
BLOCK_SIZE, STEP_TOKENS, NUM_BLOCKS = 4, 12, 90


def on_meta(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def engine_of(directory: Path) -> ResolvedConfig:
    settings = EngineSettings(
        device="cpu",
        model_impl="transformers",
        max_num_seqs=4,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=STEP_TOKENS,
        num_blocks=NUM_BLOCKS,
    )
    executor = InProcessExecutor(settings, directory, lambda _: None)
    try:
        return resolve_config(settings, ServedModel("m", "", ""), executor.model_info, NUM_BLOCKS)
    finally:
        executor.shutdown()


def test_every_family_is_compared_with_the_engine_or_with_transformers():
    assert {config.model_type for config in CONFIGS.values()} == FAMILIES


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_counted_as_the_model_has_them(name: str):
    parameters = on_meta(CONFIGS[name]).parameters()
    assert num_weights(parse_shape(CONFIGS[name].to_dict())) == sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("name", ["llama", "llama3_rope", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_weights_of_a_worker_are_counted_as_it_holds_them(name: str):
    module = AutoModelForCausalLM.from_config(CONFIGS[name])
    shard(module, CONFIGS[name], OneProcessGroup(Place(0, 2, 1)))
    counted = num_weights_of_worker(parse_shape(CONFIGS[name].to_dict()), 2)
    assert counted == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", LOADED)
def test_sizes_are_those_of_an_engine_that_has_loaded_the_model(tmp_path: Path, name: str):
    engine = engine_of(save_tiny_model(tmp_path, CONFIGS[name]))
    kv_bytes = NUM_BLOCKS * BLOCK_SIZE * engine.model_info.kv_bytes_per_token
    settings = Settings(kv_cache_bytes=kv_bytes, block_size=BLOCK_SIZE, max_num_batched_tokens=STEP_TOKENS)
    found = size(read_shape(tmp_path), settings)
    assert found.weight_bytes == engine.model_info.weight_bytes
    assert found.kv_bytes_per_token == engine.model_info.kv_bytes_per_token
    assert found.num_blocks == engine.num_blocks
    assert found.kv_tokens == engine.kv_cache_tokens
    assert found.max_model_len == engine.max_model_len
    for context in (1, 7, 50, 128):
        fitting = size(read_shape(tmp_path), settings, context).fitting_requests
        assert fitting == (NUM_BLOCKS - 1) // engine.kv_cache_layout.most_blocks(context)


LLAMA = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_gpu_has_what_weights_and_the_largest_step_leave():
    found = size(parse_shape(LLAMA), Settings(gpu_bytes=80 * GIB, overhead_bytes=2 * GIB), context=8192)
    assert found.dtype == "bfloat16"
    assert found.num_parameters == 8_030_261_248
    assert found.kv_bytes_per_token == 128 * 1024
    assert found.num_blocks == (72 * GIB - 2 * 8_030_261_248 - 2 * GIB) // (16 * 128 * 1024)
    assert found.fitting_requests == (found.num_blocks - 1) // 512


def test_concurrency_is_not_above_the_requests_of_a_step():
    found = size(parse_shape(LLAMA), Settings(gpu_bytes=80 * GIB, max_num_seqs=8), context=1024)
    assert found.concurrency == 8 < found.fitting_requests


def test_two_gpus_share_layers_and_heads():
    one, two = (
        size(parse_shape(LLAMA), Settings(gpu_bytes=80 * GIB, tensor_parallel_size=count), context=8192)
        for count in (1, 2)
    )
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    assert two.fitting_requests > 2 * one.fitting_requests


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"gpu_bytes": 16 * GIB}, "no KV cache fits"),
        ({"gpu_bytes": 24 * GIB}, r"the largest that fits is \d+ \(--max-model-len \d+ or -1\)"),
        ({"gpu_bytes": 80 * GIB, "max_model_len": 131_073}, "--max-model-len: 131073 is above"),
        ({"gpu_bytes": 80 * GIB, "tensor_parallel_size": 3}, "does not divide num_attention_heads, 32"),
    ],
)
def test_what_does_not_fit_is_said_with_its_option(settings: dict, named: str):
    with pytest.raises(SizingError, match=named):
        size(parse_shape(LLAMA), Settings(**settings))


def test_with_minus_one_the_context_is_what_fits():
    found = size(parse_shape(LLAMA), Settings(gpu_bytes=24 * GIB, max_model_len=-1))
    assert 0 < found.max_model_len < 131_072
    assert found.fitting_requests == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type: 'mamba' is not one of"),
        ({"vocab_size": None}, "vocab_size: missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers: '32'"),
    ],
)
def test_a_config_that_can_not_be_used_is_refused_by_its_field(change: dict, named: str):
    with pytest.raises(SizingError, match=named):
        parse_shape(LLAMA | change)


@pytest.mark.parametrize(
    ("family", "more", "windows"),
    [
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("gemma2", {}, (4096, None) * 2),
        ("gpt_oss", {}, (128, None) * 2),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 9)),
        ("qwen2", {"sliding_window": 9}, (None,) * 4),
    ],
)
def test_windows_of_files_without_layer_types_are_transformers_defaults(family: str, more: dict, windows: tuple):
    shape = parse_shape(LLAMA | {"model_type": family, "num_hidden_layers": 4} | more)
    assert shape.windows == windows


def test_the_command_prints_a_table_json_and_errors(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["size", "--model", str(tmp_path), "--gpu", "80", "--context", "8192"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "8,030,261,248 parameters, bfloat16" in shown.stdout
    assert json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["kv_bytes_per_token"] == 131_072
    assert CliRunner().invoke(app, [*arguments, "--kv-cache-memory", "2"]).exit_code == 2
    assert CliRunner().invoke(app, [*arguments[:-1], "200000"]).exit_code == 1
