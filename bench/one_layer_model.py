"""A one-layer model with a real vocabulary: so fast that what is left is the serving system.

`python -m bench.one_layer_model` makes it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import transformers

from bench import engine_flags
from engine_core.model_executor.model_source import resolve_model

DIRECTORY = engine_flags.BUILD / "one-layer"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make() -> Path:
    """The directory, made when it is not there yet: random weights, bfloat16, the tokenizer of the embedded model."""
    if (DIRECTORY / "config.json").exists():
        return DIRECTORY
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    embedded = resolve_model(engine_flags.settings(), lambda text: None).path
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (embedded / name).exists():
            shutil.copy(embedded / name, DIRECTORY / name)
    # Last writes the file that says that all is there.
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(DIRECTORY)
    return DIRECTORY


if __name__ == "__main__":
    sys.stdout.write(f"{make()}\n")
