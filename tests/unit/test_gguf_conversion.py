"""A GGUF file becomes an ordinary model directory, once for each state of the file."""

from __future__ import annotations

import json
import os

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoTokenizer

from engine_core.model_executor.gguf_conversion import prepare_gguf_model
from engine_core.model_executor.startup_error import StartupError
from fakes.tiny_models import load_reference, write_tiny_gguf


def prepare(path, tmp_path):
    return prepare_gguf_model(path, tmp_path / "models", lambda _: None)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("gguf")
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    return path, prepare(path, tmp_path)


def test_weights_and_config(converted):
    path, directory = converted
    model = load_reference(directory)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == 1
    assert "quantization_config" not in config
    assert config["rope_parameters"]["rope_theta"] == 5000.0
    stored = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    torch.testing.assert_close(
        model.model.layers[0].mlp.down_proj.weight.detach(), torch.tensor(stored["blk.0.ffn_down.weight"])
    )
    torch.testing.assert_close(model.lm_head.weight.detach(), torch.tensor(stored["token_embd.weight"]))


def test_tokenizer_and_chat_template(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.model_max_length == 64
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert tokenizer.decode(tokenizer("é 1 😀<|end|>").input_ids) == "é 1 😀<|end|>"


def test_digits_are_split_from_the_spaces_before_them(converted):
    # The vocabularies with this pre-tokenizer were trained so; otherwise the second space goes with the digit.
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_found_at_once_until_the_file_changes(converted, tmp_path):
    path, directory = converted
    messages = []
    assert prepare_gguf_model(path, directory.parent, messages.append) == directory
    assert messages == []
    changed = tmp_path / path.name
    changed.write_bytes(path.read_bytes())
    first = prepare(changed, tmp_path)
    os.utime(changed, ns=(1, 1))
    assert prepare(changed, tmp_path) != first


def test_scaled_rotary_frequencies_are_refused_and_not_dropped(tmp_path):
    path = write_tiny_gguf(tmp_path / "scaled.gguf", extra_tensor="rope_freqs.weight")
    with pytest.raises(StartupError, match="rotary"):
        prepare(path, tmp_path)
