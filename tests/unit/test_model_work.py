"""What a token costs in a model: its matrices, counted against torch's own count of operations and part by part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from engine_core.config import EngineSettings
from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from engine_core.model_executor.attention.kv_cache import LayerSpec
from engine_core.model_executor.executor import ModelInfo, ModelWork
from engine_core.model_executor.loader import LoadedModel, load_model
from engine_core.model_executor.models.work import Matrices, work_of
from engine_core.model_executor.parallel.place import Place
from engine_core.step_costs import StepCosts
from fakes.one_process_group import OneProcessGroup
from fakes.request_factory import make_request
from fakes.tiny_models import save_tiny_model, tiny_configs

# That of the embedded model.
SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49_152,
    tie_word_embeddings=True,
)
NUM_TOKENS = 32


def loaded_nowhere(config: PreTrainedConfig) -> LoadedModel:
    """Without memory for its weights."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    return LoadedModel(module, config, torch.bfloat16, torch.device("meta"), range(config.num_hidden_layers))


def work_of_llama(loaded: LoadedModel, *, is_int8: bool = False) -> ModelWork:
    specs = [LayerSpec(num_kv_heads=3, key_dim=64, value_dim=64)] * 30
    return work_of(loaded, Matrices.of(loaded), specs, tensor_parallel_size=1, is_int8=is_int8)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return loaded_nowhere(SMOLLM2)


def test_operations_are_those_that_torch_counts(smollm2: LoadedModel) -> None:
    with FlopCounterMode(display=False) as counted:
        smollm2.module(
            torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta"),
            # Made by it, it would want to see what is in there.
            attention_mask=torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS, device="meta", dtype=torch.bfloat16),
            logits_to_keep=1,
            use_cache=False,
        )
    # torch computes the scores of all pairs and masks half of them, as where a model is not causal.
    info = ModelInfo(
        architecture="",
        dtype="",
        vocab_size=SMOLLM2.vocab_size,
        implementation="",
        max_position_embeddings=99,
        num_layers=30,
        kv_bytes_per_token=0,
        weight_bytes=0,
        kv_cache_groups=(KVCacheGroup(30),),
        is_causal=False,
        work=work_of_llama(smollm2),
    )
    costs, request = StepCosts(info, num_workers=1), make_request(1, NUM_TOKENS)
    request.num_computed_tokens, request.num_in_flight_tokens = NUM_TOKENS, 1
    costs.count({request.key: NUM_TOKENS}, {request.key: request})
    # Beside the matrices it has rotations.
    assert costs.flops == pytest.approx(counted.get_total_flops(), rel=1e-3)


def test_a_sampled_token_costs_two_operations_for_each_parameter(smollm2: LoadedModel) -> None:
    num_params = sum(parameter.numel() for parameter in smollm2.module.parameters())
    work = work_of_llama(smollm2)
    assert num_params == pytest.approx(134.5e6, rel=0.01)
    assert work.num_matrix_params + work.num_head_params == pytest.approx(num_params, rel=0.001)
    assert work.num_head_params == 576 * 49_152


def test_bytes_are_those_of_the_type_that_the_weights_have_while_they_run(smollm2: LoadedModel) -> None:
    work, int8 = work_of_llama(smollm2), work_of_llama(smollm2, is_int8=True)
    assert (work.layer_bytes, work.head_bytes) == (2 * work.num_matrix_params, 2 * work.num_head_params)
    assert (int8.layer_bytes, int8.head_bytes) == (work.num_matrix_params, work.num_head_params)


def test_a_token_goes_through_some_experts_and_a_step_reads_all() -> None:
    # Two of four.
    loaded = loaded_nowhere(tiny_configs()["gpt_oss"])
    of_experts = sum(one.numel() for one in loaded.module.parameters() if one.dim() > 2)
    found = Matrices.of(loaded)
    assert of_experts > 0
    assert found.num_stored - found.num_used == of_experts // 2


def test_the_parts_of_workers_are_the_whole(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "llama", tiny_configs()["llama3_rope"])
    settings = EngineSettings(model="m", device="cpu", tensor_parallel_size=2, pipeline_parallel_size=3)
    whole = Matrices.of(load_model(EngineSettings(model="m", device="cpu"), directory, lambda _: None))
    places = [Place(rank, 2, 3) for rank in range(6)]
    found = [
        Matrices.of(load_model(settings, directory, lambda _: None, OneProcessGroup(place, []))) for place in places
    ]
    assert sum(part.num_stored for part in found) == whole.num_stored
    assert found[places[0].leader].num_head == whole.num_head
