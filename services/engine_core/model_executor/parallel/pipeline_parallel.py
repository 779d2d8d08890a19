"""Cuts a transformers model between layers, so that each stage of a pipeline holds and computes some of them.

Every stage keeps the model's own forward method. Layers of other stages are replaced by ones that do nothing, the one
before the stage's first by one that receives the hidden states, the one behind its last by one that sends them on. So
nothing is assumed of what the model does around its layers. Used while a model loads.
"""

from __future__ import annotations

from typing import Any

import torch

from engine_core.model_executor.parallel.worker_group import WorkerGroup
from engine_core.model_executor.startup_error import StartupError

# What this cutting knows: hidden states alone go from layer to layer.
_PLAN = {
    "embed_tokens": (["input_ids"], ["inputs_embeds"]),
    "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
    "norm": (["hidden_states"], ["hidden_states"]),
}


def require_stages(model: str, config: Any, size: int) -> None:
    """Raise StartupError when the model can not be cut into `size` stages, from its config alone."""
    if size == 1:
        return
    if config.base_model_pp_plan != _PLAN:
        raise StartupError(
            f"--pipeline-parallel-size {size}: model {model} of architecture {config.model_type} can not be cut"
        )
    if size > config.num_hidden_layers:
        raise StartupError(f"--pipeline-parallel-size {size}: model {model} has only {config.num_hidden_layers} layers")


def keep_stage(module: Any, group: WorkerGroup) -> None:
    """Leave in `module` this worker's stage; the rest of the weights is freed."""
    place = group.place
    if place.pipeline_parallel_size == 1:
        return
    decoder = module.base_model
    own = place.layers(len(decoder.layers))
    for index in range(len(decoder.layers)):
        if index not in own:
            decoder.layers[index] = _PassOn()
    if not place.is_first_stage:
        decoder.layers[own.start - 1] = _Receive(group)
        embedding = decoder.embed_tokens
        decoder.embed_tokens = _NoEmbedding(embedding.embedding_dim, embedding.weight.dtype)
    if not place.is_last_stage:
        decoder.layers[own.stop] = _Send(group)
        decoder.norm = _PassOn()
        module.set_output_embeddings(_PassOn())


class _PassOn(torch.nn.Module):
    """In the place of what another stage computes."""

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return hidden_states


class _NoEmbedding(torch.nn.Module):
    """Makes room for the hidden states that come from the stage before; nobody reads what is in it."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self._dtype = dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*input_ids.shape, self._hidden_size, dtype=self._dtype, device=input_ids.device)


class _Receive(torch.nn.Module):
    def __init__(self, group: WorkerGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        received = torch.empty_like(hidden_states)
        self._group.receive_from_previous_stage(received)
        return received


class _Send(torch.nn.Module):
    def __init__(self, group: WorkerGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        self._group.send_to_next_stage(hidden_states)
        return hidden_states
