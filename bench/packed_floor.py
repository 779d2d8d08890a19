"""The floor under a step: all matrix products of the model once, with weights packed by oneDNN, and nothing else.

A Llama-shaped model: in each layer the fused q, k and v, the output, the fused gate and up, and the down projection;
then the head. All layers' weights are walked in order, so that none is found in a cache unless the model fits one.
What a step takes beyond that is attention, norms, sampling and overhead; only better products could go below.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch


class PackedFloor:
    """Random weights of a model's shapes: how long a product takes does not depend on its values."""

    def __init__(self, model_path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self._dtype = dtype
        shapes = _shapes(json.loads((model_path / "config.json").read_text(encoding="utf-8")))
        self._weights = [(shape[1], _pack(torch.randn(shape, dtype=dtype))) for shape in shapes]

    @torch.inference_mode()
    def run(self, num_tokens: int) -> float:
        """Seconds of one walk for so many tokens."""
        inputs = {width: torch.randn(num_tokens, width).to(self._dtype) for width, _ in self._weights}
        started = time.perf_counter()
        for width, weight in self._weights:
            torch.ops.mkldnn._linear_pointwise.default(inputs[width], weight, None, "none", [], "")
        return time.perf_counter() - started


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def _shapes(config: dict[str, int]) -> list[tuple[int, int]]:
    """(outputs, inputs) of every product of a step, in order."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or hidden // num_heads
    qkv = (num_heads + 2 * num_kv_heads) * head_dim
    layer = [(qkv, hidden), (hidden, num_heads * head_dim), (2 * wide, hidden), (hidden, wide)]
    return [*layer * config["num_hidden_layers"], (config["vocab_size"], hidden)]
