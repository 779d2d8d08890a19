"""What a token costs in a loaded model, counted from its weights. Used by the thread that starts the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from engine_core.model_executor.attention.kv_cache import LayerSpec
from engine_core.model_executor.executor import ModelWork
from engine_core.model_executor.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Matrices:
    """Elements of the matrices of a model, or of one worker's part."""

    # Of the layers, with all experts, and with those alone that a token goes through.
    num_stored: int
    num_used: int
    num_head: int

    @classmethod
    def of(cls, loaded: LoadedModel) -> Matrices:
        """Before a backend packs them: afterwards the module has none."""
        module: Any = loaded.module
        # Of a stage that has none, a module without a weight.
        head = getattr(module.get_output_embeddings(), "weight", None)
        # Rows of an embedding are looked up, not multiplied.
        embeddings = [one.weight for one in module.modules() if isinstance(one, torch.nn.Embedding)]
        others = {id(weight) for weight in (head, *embeddings)}
        matrices = [one for one in module.parameters() if one.dim() > 1 and id(one) not in others]
        num_experts = getattr(loaded.config, "num_experts_per_tok", None)
        return cls(
            num_stored=sum(one.numel() for one in matrices),
            num_used=sum(_num_used(one, num_experts) for one in matrices),
            num_head=0 if head is None else head.numel(),
        )


def work_of(
    loaded: LoadedModel,
    matrices: Matrices,
    specs: Iterable[LayerSpec],
    *,
    tensor_parallel_size: int,
    is_int8: bool,
) -> ModelWork:
    """Of this worker; `specs` are those of its layers."""
    num_heads = loaded.config.num_attention_heads // tensor_parallel_size
    itemsize = 1 if is_int8 else loaded.dtype.itemsize
    return ModelWork(
        num_matrix_params=matrices.num_used,
        num_head_params=matrices.num_head,
        attention_width=sum(num_heads * (spec.key_dim + spec.value_dim) for spec in specs),
        layer_bytes=matrices.num_stored * itemsize,
        head_bytes=matrices.num_head * itemsize,
    )


def _num_used(matrix: torch.nn.Parameter, num_experts: int | None) -> int:
    """Experts lie in one tensor [experts, in, out]."""
    if matrix.dim() < 3 or num_experts is None:
        return matrix.numel()
    return matrix.numel() // matrix.shape[0] * num_experts
