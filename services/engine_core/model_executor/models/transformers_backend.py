"""Runs any supported transformers causal model on a flattened batch: the breadth and the correctness reference.

Owner: the busy-loop thread; built by the thread that starts the engine. Knows no requests and no blocks.
"""

from __future__ import annotations

import inspect

import torch

from engine_core.model_executor.attention.context import AttentionContext
from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerSpec
from engine_core.model_executor.attention.layer_probe import LayerProbe
from engine_core.model_executor.kv_cache_groups import LayerGroup, group_layers
from engine_core.model_executor.loader import LoadedModel
from engine_core.model_executor.model_weights import ModelWeights
from engine_core.model_executor.models.hidden_states import HiddenStates
from engine_core.model_executor.models.support import context_limit, is_causal, require_probed
from engine_core.model_executor.startup_error import StartupError


class TransformersBackend:
    """Implements `ModelBackend`. What it says of its layers and of its vocabulary is found by running it once."""

    name = "transformers"

    def __init__(self, model: str, loaded: LoadedModel) -> None:
        self._module = loaded.module
        self._device = loaded.device
        self.weights = ModelWeights(loaded)
        self._hidden_states = HiddenStates(loaded.module)
        self.is_causal = is_causal(loaded.config)
        probe = LayerProbe()
        self.vocab_size = self._probe(model, loaded, probe)
        self.hidden_size = self.hidden_states().shape[-1]
        require_probed(model, loaded.config, probe, loaded.layers)
        self.layer_specs: dict[int, LayerSpec] = dict(sorted(probe.specs.items()))
        # What each layer asks of attention.
        self.attention_options: dict[int, AttentionOptions] = probe.options
        windows = {layer_idx: options.sliding_window for layer_idx, options in probe.options.items()}
        if len(loaded.layers) < loaded.config.num_hidden_layers:
            # All stages of a pipeline follow the same block tables, and none knows the layers of the others.
            windows = dict.fromkeys(windows)
        self.layer_groups: tuple[LayerGroup, ...] = group_layers(
            self.layer_specs, windows, context_limit(loaded.config)
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """input_ids [T], positions [T], logits_indices [N] into T -> logits [N, vocab_size] in the model's dtype.

        The model itself turns hidden states into logits, so that its own scaling and soft cap apply.
        """
        output = self._module(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_indices,
            attention_context=context,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def logits(self, logits_indices: torch.Tensor) -> torch.Tensor:
        """logits_indices [N] into the tokens of the latest `forward` -> logits [N, vocab_size]; no layer runs again."""
        return self._hidden_states.logits(logits_indices)

    def hidden_states(self) -> torch.Tensor:
        """As `ModelBackend.hidden_states`."""
        return self._hidden_states.last

    def move_weights(self, device: torch.device) -> int:
        """Move parameters and buffers in place; returns the bytes that changed their device."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        moved_bytes = sum(tensor.nbytes for tensor in tensors if tensor.device.type != device.type)
        self._module.to(device)
        return moved_bytes

    @torch.inference_mode()
    def _probe(self, model: str, loaded: LoadedModel, probe: LayerProbe) -> int:
        architecture = type(loaded.module).__name__
        if "logits_to_keep" not in inspect.signature(loaded.module.forward).parameters:
            raise StartupError(f"--model {model}: {architecture} is not supported: it has no logits_to_keep")
        token_ids = torch.zeros(2, dtype=torch.long, device=self._device)
        last = torch.tensor([1], device=self._device)
        try:
            self.forward(token_ids, torch.arange(2, device=self._device), last, probe)
            return self.logits(last).shape[-1]
        except Exception as error:
            # A model that does not follow transformers' attention protocol may fail in any way.
            raise StartupError(f"--model {model}: {architecture} can not run on paged attention ({error})") from error
