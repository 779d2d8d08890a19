"""Which loaded models the native decoder computes; all others stay with the transformers backend.

Used by the thread that starts the engine. Looks at the loaded module itself: a part that is not known here is a reason
to leave the model alone.
"""

from __future__ import annotations

from typing import Any

import torch

from engine_core.model_executor.loader import LoadedModel
from engine_core.model_executor.models.decoder_layer import activation_name, is_known_activation

# Each is tested against transformers (tests/e2e/test_model_runner_vs_transformers.py).
_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma", "gemma2", "gemma3_text"})
_PROJECTIONS = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj",
        "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    }
)  # fmt: skip
_NORMS = frozenset(
    {
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
        "q_norm", "k_norm",
    }
)  # fmt: skip
# Without an effect once a model is in eval mode.
_IDLE = frozenset({"resid_attn_dropout", "resid_mlp_dropout"})
_KNOWN = _PROJECTIONS | _NORMS | _IDLE | {"self_attn", "mlp", "act_fn", "activation_fn"}


def reason_against(loaded: LoadedModel, is_causal: bool) -> str:
    """Why the native decoder can not compute this model; empty if it can."""
    config = loaded.config
    if config.model_type not in _FAMILIES:
        return f"no family of models it knows ({config.model_type})"
    if not is_causal:
        return "attention that is not causal"
    if len(loaded.layers) < config.num_hidden_layers:
        return "only a stage of the model is here"
    if not is_known_activation(config):
        return f"activation {activation_name(config)}"
    module: Any = loaded.module
    unknown = {part for layer in module.base_model.layers for part in _unknown_parts(layer)}
    return f"layers with {', '.join(sorted(unknown))}" if unknown else ""


def _unknown_parts(layer: torch.nn.Module) -> set[str]:
    unknown = set()
    for path, part in layer.named_modules():
        name = path.rpartition(".")[2]
        has_own_parameters = any(True for _ in part.parameters(recurse=False))
        if path and name not in _KNOWN:
            unknown.add(name)
        elif name in _PROJECTIONS and type(part) is not torch.nn.Linear:
            unknown.add(f"{name} of type {type(part).__name__}")
        elif has_own_parameters and name not in _PROJECTIONS | _NORMS:
            unknown.add(f"parameters of {name or 'their own'}")
    return unknown
