"""The stages of a model, run one after the other, compute what the whole model computes, whatever its family."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine_core.model_executor.parallel.pipeline_parallel import keep_stage, require_stages
from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.startup_error import StartupError
from fakes.one_process_group import OneProcessGroup
from fakes.tiny_models import load_reference, save_tiny_model, tiny_configs


@pytest.mark.parametrize("name", [name for name in tiny_configs() if name != "phi"])
@pytest.mark.parametrize("num_stages", [2, 3])
@torch.inference_mode()
def test_stages_one_after_the_other_are_the_whole(name, num_stages, tmp_path):
    config = tiny_configs()[name]
    require_stages("m", config, num_stages)
    directory = save_tiny_model(tmp_path, config)
    input_ids = torch.randint(3, 200, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = load_reference(directory)(input_ids, use_cache=False).logits
    wire: list[torch.Tensor] = []
    for stage in range(num_stages):
        module = load_reference(directory)
        keep_stage(module, OneProcessGroup(Place(stage, 1, num_stages), wire))
        output = module(input_ids, use_cache=False, logits_to_keep=torch.arange(9)).logits
        assert len(wire) == (stage < num_stages - 1)
    torch.testing.assert_close(output, expected)


def test_a_stage_holds_its_layers_alone():
    config = tiny_configs()["llama"]
    stages = [AutoModelForCausalLM.from_config(config) for _ in range(2)]
    for rank, module in enumerate(stages):
        keep_stage(module, OneProcessGroup(Place(rank, 1, 2)))
    names = [{name for name, _ in module.named_parameters()} for module in stages]
    layers = [{name.split(".")[2] for name in of_stage if ".layers." in name} for of_stage in names]
    assert layers == [{"0", "1"}, {"2"}]
    assert "model.embed_tokens.weight" in names[0]
    assert "model.norm.weight" not in names[0]
    # Tied to the embedding, which only the head needs here.
    assert "lm_head.weight" in names[1]
    assert "model.embed_tokens.weight" not in names[1]


def test_more_stages_than_layers():
    with pytest.raises(StartupError, match="--pipeline-parallel-size 4: model m has only 3 layers"):
        require_stages("m", tiny_configs()["llama"], 4)
    # Its last norm has another name.
    with pytest.raises(StartupError, match="architecture phi can not be cut"):
        require_stages("m", tiny_configs()["phi"], 2)


def test_layers_that_hand_on_more_than_hidden_states_are_refused():
    class Other(LlamaConfig):
        base_model_pp_plan = None

    with pytest.raises(StartupError, match="can not be cut"):
        require_stages("m", Other(), 2)
