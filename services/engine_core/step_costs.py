"""What steps cost by their plans: operations, and bytes read and written. Estimates, on demand: `--mfu-metrics`.

From the sizes of the model alone, which nobody measures: with the time of the steps and what the device can do they
tell how well it is used. Plain integers, written by the busy-loop thread and read by a scrape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from engine_core.model_executor.executor import ModelInfo
from engine_core.scheduler.request import Request, RequestKey

# An addition and a multiplication.
_FLOPS_PER_PARAM = 2


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers that see the same tokens, and what one key costs in all of them."""

    group: KVCacheGroup
    flops_per_key: int
    kv_bytes: int


class StepCosts:
    """Sums since the start, of all workers together; a metric that is one of a worker divides by `num_workers`."""

    def __init__(self, info: ModelInfo, num_workers: int) -> None:
        self.num_workers = num_workers
        self.flops = 0
        self.read_bytes = 0
        self.write_bytes = 0
        self._work = info.work
        self._is_causal = info.is_causal
        num_layers = sum(group.num_layers for group in info.kv_cache_groups)
        # What a block holds for each token is made for the largest group.
        largest = max(group.num_layers for group in info.kv_cache_groups)
        self._groups = [
            _Group(
                group,
                _FLOPS_PER_PARAM * info.work.attention_width * group.num_layers // num_layers,
                info.kv_bytes_per_token * group.num_layers // largest,
            )
            for group in info.kv_cache_groups
        ]
        self._kv_bytes = sum(one.kv_bytes for one in self._groups)

    def count(self, scheduled: Mapping[RequestKey, int], requests: Mapping[RequestKey, Request]) -> None:
        """A step was just planned: the computed tokens of its requests are those behind it.

        Not counted: log-probabilities of prompts, norms, and what passes from layer to layer.
        """
        if not scheduled:
            return
        num_sampled = 0
        for key, num_new in scheduled.items():
            request = requests[key]
            # Its known tokens are all computed by this step, and nothing is sampled for a vector.
            num_sampled += request.num_in_flight_tokens > 0 and request.pooling is None
            self._count_attention(request.num_computed_tokens - num_new, num_new)
        num_tokens, work = sum(scheduled.values()), self._work
        self.flops += _FLOPS_PER_PARAM * (work.num_matrix_params * num_tokens + work.num_head_params * num_sampled)
        self.read_bytes += work.layer_bytes + (work.head_bytes if num_sampled else 0)
        self.write_bytes += self._kv_bytes * num_tokens

    def _count_attention(self, num_before: int, num_new: int) -> None:
        """Of one request: each new token sees keys, and all of them together read what they see once."""
        num_known = num_before + num_new
        for one in self._groups:
            if self._is_causal:
                num_seen = _num_seen(one.group, num_known) - _num_seen(one.group, num_before)
            else:
                num_seen = num_new * num_known
            self.flops += one.flops_per_key * num_seen
            self.read_bytes += one.kv_bytes * (num_known - one.group.num_hidden_tokens(num_before))


def _num_seen(group: KVCacheGroup, num_tokens: int) -> int:
    """Keys that the first tokens of a sequence see, added up: 1 + 2 + 3 and so on, up to the window."""
    window = num_tokens if group.sliding_window is None else min(group.sliding_window, num_tokens)
    return window * (window + 1) // 2 + (num_tokens - window) * window
