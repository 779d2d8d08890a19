"""Which models stepwire runs: decoder-only, with ordinary attention in every layer.

Owner: the thread that starts the engine. A model that is not refused here and not by the probe computes what
transformers computes; better to refuse one that would work than to serve one that answers wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine_core.model_executor.attention.layer_probe import LayerProbe
from engine_core.model_executor.startup_error import StartupError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Their rotary frequencies change with the longest sequence of a batch, above the original context length.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def require_supported(model: str, config: Any) -> None:
    """Raise StartupError for a model that stepwire can not run, from its config alone."""
    reason = _reason_against(config)
    if reason:
        raise StartupError(f"--model {model}: architecture {config.model_type} is not supported: {reason}")


def require_probed(model: str, config: Any, probe: LayerProbe, layers: range) -> None:
    """Raise StartupError when the layers that called attention are not those the config promises."""
    if sorted(probe.specs) != list(layers):
        raise StartupError(
            f"--model {model}: architecture {config.model_type} is not supported: {len(probe.specs)} of its "
            f"{len(layers)} layers use attention"
        )
    for layer_idx, options in sorted(probe.options.items()):
        if _is_sliding(config, layer_idx) != (options.sliding_window is not None):
            raise StartupError(
                f"--model {model}: architecture {config.model_type} is not supported: layer {layer_idx} does not "
                f"hand its sliding window to attention"
            )
        if options.is_causal != is_causal(config):
            raise StartupError(
                f"--model {model}: architecture {config.model_type} is not supported: layer {layer_idx} is "
                f"{'' if options.is_causal else 'not '}causal, and its config says otherwise"
            )


def is_causal(config: Any) -> bool:
    """Whether no token sees a later one; if not, all tokens of a prompt see each other."""
    return bool(getattr(config, "is_causal", True))


def context_limit(config: Any) -> int:
    """The longest context that is computed the same whatever else is in the batch."""
    limit = int(config.max_position_embeddings)
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            # Of the layer kind, else of the model, else the limit is the original one.
            fallback = getattr(config, "original_max_position_embeddings", None) or limit
            limit = min(limit, int(rope.get("original_max_position_embeddings") or fallback))
    return limit


def _reason_against(config: Any) -> str:
    text_config = config.get_text_config()
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "it is not a causal language model"
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class._is_stateful:
        return "it has state other than attention's"
    if not model_class._supports_attention_backend:
        return "its attention can not be replaced"
    if getattr(text_config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    if not is_causal(text_config) and any(_is_sliding(text_config, i) for i in range(text_config.num_hidden_layers)):
        return "it is not causal and has a sliding window"
    if getattr(text_config, "max_position_embeddings", None) is None:
        return "it names no longest context"
    others = set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES
    return f"it has layers of type {', '.join(sorted(others))}" if others else ""


def _is_sliding(config: Any, layer_idx: int) -> bool:
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return bool(layer_types[layer_idx] == "sliding_attention")
    return getattr(config, "sliding_window", None) is not None


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """One dictionary, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, dict))
