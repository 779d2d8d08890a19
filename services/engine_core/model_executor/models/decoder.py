"""The native decoder: Llama and what descends from it, as a loop over kernels and fused matrix products.

One path for prompts, chunks and decodes. Faster than the transformers module it takes its weights from, and equal to
it. Owner: the thread that runs the model; built by the one that starts the engine. Knows no requests and no blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine_core.model_executor.attention.core import AttentionOptions
from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.attention.metadata import AttentionMetadata
from engine_core.model_executor.attention.paged_attention import PagedAttention
from engine_core.model_executor.huge_pages import use_huge_pages
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.loader import LoadedModel
from engine_core.model_executor.model_weights import ModelWeights
from engine_core.model_executor.models.decoder_layer import DecoderLayer, Norm, make_layer, make_norm, make_ropes
from engine_core.model_executor.models.fused_layers import DecoderEnds, fuse_layers
from engine_core.model_executor.models.linear import FusedLinear, LinearOptions, Reduce
from engine_core.model_executor.models.rope import Rope
from engine_core.model_executor.models.transformers_backend import TransformersBackend
from stepwire.errors import InvariantViolation

# cos, sin: float32 [T, R] each.
_Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What all layers of a step write to in turn: T tokens."""

    # [T, n]
    normed: torch.Tensor
    # [T, H * D] and the same as [T, H, D].
    attended: torch.Tensor
    attended_heads: torch.Tensor
    # [T, intermediate size]
    activated: torch.Tensor


class NativeDecoder:
    """Implements `ModelBackend`. What it says of its layers is what the transformers backend has found out."""

    name = "native"

    def __init__(
        self,
        loaded: LoadedModel,
        probed: TransformersBackend,
        kernels: Kernels,
        reduce: Reduce | None,
        linear_options: LinearOptions | None = None,
    ) -> None:
        """Takes the weights over; the transformers backend can not run any more. The rest: see `FusedLinear`."""
        self.is_causal = probed.is_causal
        self.vocab_size = probed.vocab_size
        self.hidden_size = probed.hidden_size
        self.layer_specs = probed.layer_specs
        self.layer_groups = probed.layer_groups
        self._loaded = loaded
        self._module: Any = loaded.module
        self._options: dict[int, AttentionOptions] = probed.attention_options
        self._kernels = kernels
        self._reduce = reduce
        self._linear_options = linear_options or LinearOptions()
        self._head_dim = self.layer_specs[0].key_dim
        self._logits_softcap: float | None = getattr(loaded.config, "final_logit_softcapping", None)
        # Before they are packed: from then on the module has no shapes to tell.
        # By a weak reference: in a cycle, hundreds of megabytes would wait for the garbage collector.
        self.weights = ModelWeights(loaded, weakref.proxy(self))
        # Final hidden states of the latest step, [T, n].
        self._hidden: torch.Tensor | None = None
        self.pack()

    def pack(self) -> None:
        """Make the layers from the weights of the module."""
        decoder = self._module.base_model
        config = self._loaded.config
        self._embedding: torch.nn.Module = decoder.embed_tokens
        # A worker's part of them.
        self._attended_size = int(decoder.layers[0].self_attn.o_proj.in_features)
        self._activated_size = int(decoder.layers[0].mlp.down_proj.in_features)
        ropes = make_ropes(decoder.rotary_emb, config)
        layers = self._layers = [
            make_layer(layer, index, config, ropes, self._options[index], self._reduce, self._linear_options)
            for index, layer in enumerate(decoder.layers)
        ]
        self._ropes: set[Rope] = {layer.rope for layer in layers}
        self._final_norm: Norm = make_norm(decoder.norm, config)
        head = self._module.lm_head
        lm_head = FusedLinear(
            [head], is_shared=head.weight is decoder.embed_tokens.weight, options=self._linear_options
        )
        self._lm_head: FusedLinear | None = lm_head
        ends = DecoderEnds(self._embedding, self._final_norm, lm_head)
        self._fused = fuse_layers(self._kernels, layers, self.layer_groups, ends, self._loaded.dtype)
        linears = [lm_head, *(linear for layer in layers for linear in layer.linears)]
        use_huge_pages((linear.panels.panels for linear in linears if linear.panels is not None), are_written=True)

    def unpack(self) -> None:
        """Give the weights back to the module; nothing runs before the next `pack`."""
        self._fused = None
        for layer in self._layers:
            for linear in layer.linears:
                linear.unpack()
        if self._lm_head is not None:
            self._lm_head.unpack()
        self._let_go()

    def drop(self) -> None:
        """Let go of the weights, which nobody wants any more."""
        self._let_go()
        if self._linear_options.int8 is not None:
            self._linear_options.int8.given_back.clear()

    def _let_go(self) -> None:
        self._layers, self._lm_head = [], None
        self._fused, self._hidden = None, None

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor, context: PagedAttention
    ) -> torch.Tensor:
        """As `ModelBackend.forward`."""
        if self._lm_head is None:
            raise InvariantViolation("a forward pass while the weights are out of use")
        if self._fused is not None and len(input_ids) <= self._fused.max_tokens:
            self._hidden, logits = self._fused.run(input_ids, positions, logits_indices, context)
            return self.logits(logits_indices) if logits is None else self._capped(logits)
        # float32: rounded to the weights' type after each of its additions it would lose more than any product does.
        residual = self._embedding(input_ids).float()
        rotations = {rope: rope(positions) for rope in self._ropes}
        branch = self._run_layers(residual, rotations, context)
        self._hidden = self._add_norm(residual, branch, self._final_norm, self._empty_like(residual))
        return self.logits(logits_indices)

    def logits(self, logits_indices: torch.Tensor) -> torch.Tensor:
        """As `ModelBackend.logits`."""
        if self._hidden is None or self._lm_head is None:
            raise InvariantViolation("logits before the first forward pass")
        return self._capped(self._lm_head(self._hidden[logits_indices]))

    def hidden_states(self) -> torch.Tensor:
        """As `ModelBackend.hidden_states`."""
        if self._hidden is None:
            raise InvariantViolation("hidden states before the first forward pass")
        return self._hidden

    def move_weights(self, device: torch.device) -> int:
        """As `ModelBackend.move_weights`. Weights that are not on the model's device are not packed."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        moved_bytes: int = sum(tensor.nbytes for tensor in tensors if tensor.device.type != device.type)
        if moved_bytes:
            self.unpack()
            self._module.to(device)
        is_here = device.type == self._loaded.device.type
        # Also when nothing had to move: an attempt before this one may have failed half-way.
        if is_here and self._lm_head is None and not self.weights.are_discarded:
            self.pack()
        return moved_bytes

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self._logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _run_layers(
        self, residual: torch.Tensor, rotations: Mapping[Rope, _Rotation], context: PagedAttention
    ) -> torch.Tensor | None:
        """Adds to residual; what the last layer has still to add."""
        buffers = self._buffers(residual)
        branch: torch.Tensor | None = None
        for layer in self._layers:
            cache, metadata = context.caches[layer.index], context.metadata[layer.index]
            attended = self._attend(layer, residual, branch, rotations[layer.rope], cache, metadata, buffers)
            branch = self._transform(layer, residual, attended, buffers)
        return branch

    def _attend(
        self,
        layer: DecoderLayer,
        residual: torch.Tensor,
        branch: torch.Tensor | None,
        rotation: _Rotation,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        buffers: _Buffers,
    ) -> torch.Tensor:
        """Add the branch of the layer before; the attention branch of this one, [T, n]."""
        qkv = layer.qkv(self._add_norm(residual, branch, layer.input_norm, buffers.normed))
        self._kernels.rope_and_cache(qkv, *rotation, cache, metadata.slot_mapping, layer.qk_norm)
        query = qkv[:, : self._attended_size].view(buffers.attended_heads.shape)
        self._kernels.paged_attention(query, cache, metadata, layer.attention, buffers.attended_heads)
        return self._post_norm(layer.o(buffers.attended), layer.post_attention_norm)

    def _transform(
        self, layer: DecoderLayer, residual: torch.Tensor, attended: torch.Tensor, buffers: _Buffers
    ) -> torch.Tensor:
        """Add the attention branch; the MLP branch, [T, n]."""
        gate_up = layer.gate_up(self._add_norm(residual, attended, layer.mlp_norm, buffers.normed))
        self._kernels.act_mul(gate_up, layer.activation, buffers.activated)
        return self._post_norm(layer.down(buffers.activated), layer.post_mlp_norm)

    def _add_norm(
        self, residual: torch.Tensor, branch: torch.Tensor | None, norm: Norm, out: torch.Tensor
    ) -> torch.Tensor:
        self._kernels.add_rms_norm(residual, branch, norm.weight, norm.eps, out)
        return out

    def _post_norm(self, branch: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return branch if norm is None else self._add_norm(branch, None, norm, branch)

    def _buffers(self, residual: torch.Tensor) -> _Buffers:
        num_tokens = len(residual)
        dtype = self._loaded.dtype
        attended = residual.new_empty(num_tokens, self._attended_size, dtype=dtype)
        return _Buffers(
            normed=self._empty_like(residual),
            attended=attended,
            attended_heads=attended.view(num_tokens, -1, self._head_dim),
            activated=residual.new_empty(num_tokens, self._activated_size, dtype=dtype),
        )

    def _empty_like(self, residual: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(residual, dtype=self._loaded.dtype)
