"""One layer of the native decoder: its weights as the kernels want them, taken from a layer of the loaded module.

Made when a model is loaded or its weights have changed; the decoder's loop only reads the fields. What a family does
differently is a field here, and no branch on its name anywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.kernels.interface import Activation, QKNorm
from engine_core.model_executor.models.linear import FusedLinear, LinearOptions, Reduce
from engine_core.model_executor.models.rope import Rope, no_rope, rope_of

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_NO_ROPE = "none"


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: out = x / rms(x) * weight, weight float32 [n]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A post-norm, where there is one, is applied to what a branch has computed before it is added."""

    index: int
    # Queries, keys and values; gate and up.
    qkv: FusedLinear
    o: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    input_norm: Norm
    mlp_norm: Norm
    post_attention_norm: Norm | None
    post_mlp_norm: Norm | None
    qk_norm: QKNorm | None
    rope: Rope
    attention: AttentionOptions
    activation: Activation

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


def make_layer(
    module: Any,
    index: int,
    config: Any,
    ropes: dict[str, Rope],
    attention_options: AttentionOptions,
    reduce: Reduce | None,
    options: LinearOptions,
) -> DecoderLayer:
    """From transformers' layer, which gives its matrices up; `attention_options` are those it hands to attention."""
    attention, mlp = module.self_attn, module.mlp
    # The same name means a norm of the branch in one family and of the next branch's input in another.
    has_post_norms = hasattr(module, "pre_feedforward_layernorm")
    mlp_norm = module.pre_feedforward_layernorm if has_post_norms else module.post_attention_layernorm
    return DecoderLayer(
        index=index,
        qkv=FusedLinear(_parts(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"), options=options),
        o=FusedLinear([attention.o_proj], reduce=reduce, options=options),
        gate_up=FusedLinear(_parts(mlp, "gate_up_proj", "gate_proj", "up_proj"), options=options),
        down=FusedLinear([mlp.down_proj], reduce=reduce, options=options),
        input_norm=make_norm(module.input_layernorm, config),
        mlp_norm=make_norm(mlp_norm, config),
        post_attention_norm=make_norm(module.post_attention_layernorm, config) if has_post_norms else None,
        post_mlp_norm=make_norm(module.post_feedforward_layernorm, config) if has_post_norms else None,
        qk_norm=_qk_norm(attention, config),
        rope=ropes[_layer_type(config, index) if getattr(attention, "use_rope", True) else _NO_ROPE],
        attention=attention_options,
        activation=_ACTIVATIONS[activation_name(config)],
    )


def make_ropes(rotary_embedding: Any, config: Any) -> dict[str, Rope]:
    """The rotation of each type of layer, and of those that have none."""
    types = {_layer_type(config, index) for index in range(config.num_hidden_layers)}
    ropes = {layer_type: rope_of(rotary_embedding, layer_type) for layer_type in types}
    return {**ropes, _NO_ROPE: no_rope(next(rotary_embedding.buffers()).device)}


def make_norm(module: Any, config: Any) -> Norm:
    weight = module.weight.detach().float()
    # Gemma stores the difference to 1.
    if config.model_type.startswith("gemma"):
        weight = weight + 1.0
    return Norm(weight, float(module.eps if hasattr(module, "eps") else module.variance_epsilon))


def activation_name(config: Any) -> str:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    return str(name)


def is_known_activation(config: Any) -> bool:
    return activation_name(config) in _ACTIVATIONS


def _qk_norm(attention: Any, config: Any) -> QKNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    query_norm, key_norm = make_norm(attention.q_norm, config), make_norm(attention.k_norm, config)
    return QKNorm(query_norm.weight, key_norm.weight, query_norm.eps)


def _layer_type(config: Any, index: int) -> str:
    layer_types = getattr(config, "layer_types", None)
    return str(layer_types[index]) if layer_types else ""


def _parts(module: Any, fused: str, *names: str) -> list[torch.nn.Linear]:
    """The matrices that are fused here, or the one that is in the checkpoint already."""
    return [getattr(module, fused)] if hasattr(module, fused) else [getattr(module, name) for name in names]
