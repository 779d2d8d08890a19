"""Small random models of several families, saved as Hugging Face directories, and a small GGUF file."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

VOCAB_SIZE = 211
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_configs() -> dict[str, PreTrainedConfig]:
    """One config of each family; windows are short enough to matter in a test."""
    return {
        "llama": LlamaConfig(**_SIZES, tie_word_embeddings=True),
        "llama3_rope": LlamaConfig(
            **_SIZES,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        "yarn_rope": Qwen3Config(
            **_SIZES,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        "smollm3": SmolLM3Config(**{**_SIZES, "num_hidden_layers": 4}, no_rope_layer_interval=2),
        "gemma": GemmaConfig(**_SIZES),
        "qwen2": Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
        "qwen3": Qwen3Config(**_SIZES),
        "mistral": MistralConfig(**_SIZES, sliding_window=6),
        "gemma2": Gemma2Config(
            **_SIZES, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=4
        ),
        "gemma3": Gemma3TextConfig(
            **{**_SIZES, "num_hidden_layers": 5},
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        ),
        # Its rotated and its other features are joined in an order of their own.
        "phi": PhiConfig(**{k: v for k, v in _SIZES.items() if k != "head_dim"}),
        "phi3": Phi3Config(**_SIZES, sliding_window=9),
        "phi3_partial_rope": Phi3Config(
            **_SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        ),
        "gpt_oss": GptOssConfig(**_SIZES, sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
    }


def save_tiny_model(directory: Path, config: PreTrainedConfig, seed: int = 0) -> Path:
    """Random weights, large enough that logits differ clearly and soft caps bite; no bias is 0, and no norm another."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    return directory


def save_shardable_model(directory: Path, tokenizer_dir: Path) -> Path:
    """A Llama that two workers can share, with the tokenizer of a model that they can not."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
    vocab_size = AutoConfig.from_pretrained(tokenizer_dir).vocab_size
    config = LlamaConfig(
        **{**_SIZES, **sizes, "vocab_size": vocab_size, "max_position_embeddings": 8192}, tie_word_embeddings=True
    )
    save_tiny_model(directory, config)
    for file in tokenizer_dir.iterdir():
        if file.name not in ("config.json", "generation_config.json") and file.suffix in (".json", ".jinja"):
            shutil.copy(file, directory)
    return directory


def load_reference(directory: Path) -> torch.nn.Module:
    """The same model as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(
        directory, config=AutoConfig.from_pretrained(directory), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def write_tiny_gguf(path: Path, *, pre: str = "smollm", extra_tensor: str = "") -> Path:
    """A one-layer Llama with a byte-level vocabulary of the 256 bytes and two control tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(24)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(8)
    tokens = ["<|start|>", "<|end|>", *_byte_alphabet(), "ĠĠ"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    generator = np.random.default_rng(0)
    for name, shape in _gguf_shapes(len(tokens)).items():
        writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32))
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    return {
        "token_embd.weight": (vocab_size, 16),
        "output_norm.weight": (16,),
        "blk.0.attn_norm.weight": (16,),
        "blk.0.ffn_norm.weight": (16,),
        "blk.0.attn_q.weight": (16, 16),
        "blk.0.attn_k.weight": (8, 16),
        "blk.0.attn_v.weight": (8, 16),
        "blk.0.attn_output.weight": (16, 16),
        "blk.0.ffn_gate.weight": (24, 16),
        "blk.0.ffn_up.weight": (24, 16),
        "blk.0.ffn_down.weight": (16, 24),
    }


def _byte_alphabet() -> list[str]:
    """The printable stand-ins of byte-level vocabularies, in order of their bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
