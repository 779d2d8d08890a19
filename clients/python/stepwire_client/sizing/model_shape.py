"""A model's sizes as its config.json gives them, with transformers' defaults for what the file leaves out.

Pure but for reading that one file. Knows the families that the engine computes itself, and a few mixtures of experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FAMILIES = frozenset(
    {
        "llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma", "gemma2", "gemma3_text",
        "mixtral", "qwen3_moe", "gpt_oss",
    }
)  # fmt: skip
_TIED = frozenset({"gemma", "gemma2", "gemma3_text", "smollm3"})
_HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128, "gpt_oss": 64}
_WINDOWS = {"mistral": 4096, "gemma2": 4096, "gemma3_text": 4096, "gpt_oss": 128, "qwen2": 4096, "qwen3": 4096}
# Of so many layers one sees all tokens, the last of them.
_PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}
# Their frequencies change with the length above the original context, which therefore is the limit.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class SizingError(Exception):
    """What is asked can not be computed; the message names the field or the option."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides about memory. A window of None sees all tokens."""

    family: str
    # None: the file does not say, or says one that is not served.
    dtype: str | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    max_model_len: int
    is_tied: bool
    # The file itself, for what only some families have.
    raw: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def kv_layer_bytes(self, dtype: str, tensor_parallel_size: int = 1) -> int:
        """Keys and values of one token in one layer, on one worker, in bytes."""
        return self.num_kv_heads // tensor_parallel_size * 2 * self.head_dim * DTYPE_BYTES[dtype]


def read_shape(path: Path) -> ModelShape:
    """From a config.json or the directory that holds one. Raises SizingError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SizingError(f"--model: {file} can not be read ({error.strerror})") from error
    except ValueError as error:
        raise SizingError(f"--model: {file} is no JSON ({error})") from error
    if not isinstance(raw, dict):
        raise SizingError(f"--model: {file} holds no JSON object")
    return parse_shape(raw)


def parse_shape(raw: Mapping[str, Any]) -> ModelShape:
    """From the content of a config.json. Raises SizingError."""
    family = raw.get("model_type", "")
    if family not in FAMILIES:
        raise SizingError(f"model_type: {family!r} is not one of {', '.join(sorted(FAMILIES))}")
    num_heads = _positive(raw, "num_attention_heads")
    hidden_size = _positive(raw, "hidden_size")
    dtype = raw.get("dtype", raw.get("torch_dtype"))
    return ModelShape(
        family=family,
        dtype=dtype if dtype in DTYPE_BYTES else None,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_positive(raw, "num_key_value_heads", num_heads),
        head_dim=_positive(raw, "head_dim", _HEAD_DIMS.get(family, hidden_size // num_heads)),
        windows=_windows(family, raw),
        max_model_len=_context_limit(raw),
        is_tied=bool(raw.get("tie_word_embeddings", family in _TIED)),
        raw=raw,
    )


def _positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise SizingError(f"{name}: {'missing' if value is None else repr(value)}; a number of at least 1 is needed")
    return value


def _windows(family: str, raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """One entry for each layer."""
    num_layers = _positive(raw, "num_hidden_layers")
    window = raw.get("sliding_window", _WINDOWS.get(family))
    if window is None or (family in ("qwen2", "qwen3", "smollm3") and not raw.get("use_sliding_window")):
        return (None,) * num_layers
    types = raw.get("layer_types")
    if types is not None and len(types) != num_layers:
        raise SizingError(f"layer_types: {len(types)} entries for {num_layers} layers")
    return tuple(
        window if (types[i] == "sliding_attention" if types else _slides(family, raw, i)) else None
        for i in range(num_layers)
    )


def _slides(family: str, raw: Mapping[str, Any], layer: int) -> bool:
    """What transformers assumes where the file has no layer_types."""
    if family in _PATTERNS:
        return (layer + 1) % _PATTERNS[family] != 0
    if family in ("qwen2", "qwen3"):
        return layer >= int(raw.get("max_window_layers", 28))
    return True


def _context_limit(raw: Mapping[str, Any]) -> int:
    limit = _positive(raw, "max_position_embeddings")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    is_one = "rope_type" in rope or "type" in rope
    for parameters in [rope] if is_one else [value for value in rope.values() if isinstance(value, dict)]:
        if parameters.get("rope_type", parameters.get("type")) in _LENGTH_DEPENDENT_ROPE:
            original = parameters.get("original_max_position_embeddings")
            limit = min(limit, original or raw.get("original_max_position_embeddings") or limit)
    return limit
