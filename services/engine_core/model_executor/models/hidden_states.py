"""The last hidden states of a transformers model, kept so that logits of more positions cost no second forward pass.

Owner: the busy-loop thread. The model itself turns hidden states into logits (its scaling and soft cap are its own),
and offers no call for that alone; so its decoder is made to give its latest answer once more.
"""

from __future__ import annotations

from typing import Any

import torch

from stepwire.errors import InvariantViolation


class HiddenStates:
    """Stands in front of the decoder inside a causal model. Holds the output of the latest forward pass."""

    def __init__(self, module: Any) -> None:
        decoder = module.base_model
        self._module = module
        self._compute = decoder.forward
        self._latest: Any = None
        self._is_replay = False
        # On the instance: every other model of the class stays as it is.
        decoder.forward = self._forward

    @property
    def last(self) -> torch.Tensor:
        """Of all tokens of the latest forward pass, [T, n]."""
        if self._latest is None:
            raise InvariantViolation("hidden states before the first forward pass")
        hidden: torch.Tensor = self._latest.last_hidden_state[0]
        return hidden

    def logits(self, logits_indices: torch.Tensor) -> torch.Tensor:
        """logits_indices [N] into the tokens of the latest forward pass -> logits [N, vocab_size]."""
        if self._latest is None:
            raise InvariantViolation("logits before the first forward pass")
        self._is_replay = True
        try:
            # The ids are not looked at; only their shape has to be one.
            output = self._module(input_ids=logits_indices[None], use_cache=False, logits_to_keep=logits_indices)
        finally:
            self._is_replay = False
        logits: torch.Tensor = output.logits[0]
        return logits

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_replay:
            self._latest = self._compute(*args, **kwargs)
        return self._latest
