"""Cuts the layers of a transformers model, so that each worker holds and computes one part of every matrix.

Which matrices are cut by their outputs (columns) and which by their inputs (rows) says the model's own plan in
transformers; the cutting is done here, on plain tensors, because a wrapper around each of them would cost more time in
a decode step than the matrix product. Embedding and output matrix stay whole on each worker. Used while a model loads.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from engine_core.model_executor.parallel.worker_group import WorkerGroup
from engine_core.model_executor.startup_error import StartupError

_COLUMNS, _ROWS = "colwise", "rowwise"
# The gradient is of no interest here.
_WHOLE = "replicated_with_grad_allreduce"


def require_shardable(model: str, config: Any, size: int) -> None:
    """Raise StartupError when the model can not be cut into `size` parts, from its config alone."""
    if size == 1:
        return
    plan = config.base_model_tp_plan or {}
    others = set(plan.values()) - {_COLUMNS, _ROWS, _WHOLE}
    if others or not {_COLUMNS, _ROWS} <= set(plan.values()):
        reason = f"its plan has {', '.join(sorted(others))}" if others else "it has no plan"
        raise StartupError(
            f"--tensor-parallel-size {size}: model {model} of architecture {config.model_type} can not be cut: {reason}"
        )
    counts = {
        "attention heads": config.num_attention_heads,
        "key/value heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "intermediate features": config.intermediate_size,
    }
    if any(count % size for count in counts.values()):
        divisor = math.gcd(*counts.values())
        possible = [str(number) for number in range(1, divisor + 1) if divisor % number == 0]
        raise StartupError(
            f"--tensor-parallel-size {size} does not divide what model {model} has: "
            f"{', '.join(f'{count} {name}' for name, count in counts.items())}; possible are {', '.join(possible)}"
        )


def shard(module: Any, config: Any, group: WorkerGroup) -> None:
    """Leave in `module` this worker's part of each layer; the rest of the weights is freed."""
    if group.place.tensor_parallel_size == 1:
        return
    for name, layer in module.base_model.named_modules():
        style = config.base_model_tp_plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if style in (_COLUMNS, _ROWS) and not isinstance(layer, torch.nn.Linear):
            raise StartupError(f"--tensor-parallel-size: {name} is a {type(layer).__name__} and can not be cut")
        if style == _COLUMNS:
            _keep_columns(layer, group)
        elif style == _ROWS:
            _keep_rows(layer, group)


def _keep_columns(layer: torch.nn.Linear, group: WorkerGroup) -> None:
    """[out, in] -> [out / size, in]: a part of the outputs, each of them whole."""
    layer.weight = _part(layer.weight, 0, group)
    if layer.bias is not None:
        layer.bias = _part(layer.bias, 0, group)
    layer.out_features = layer.weight.shape[0]


def _keep_rows(layer: torch.nn.Linear, group: WorkerGroup) -> None:
    """[out, in] -> [out, in / size]: all outputs, as summands that the workers add up."""
    layer.weight = _part(layer.weight, 1, group)
    layer.in_features = layer.weight.shape[1]
    if group.place.shard:
        # Once in the sum.
        layer.register_parameter("bias", None)
    layer.register_forward_hook(lambda _layer, _inputs, output: group.sum_over_shards(output))


def _part(parameter: torch.Tensor, dim: int, group: WorkerGroup) -> torch.nn.Parameter:
    part = parameter.detach().chunk(group.place.tensor_parallel_size, dim)[group.place.shard]
    # A copy: a view would keep the whole matrix in memory.
    return torch.nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
