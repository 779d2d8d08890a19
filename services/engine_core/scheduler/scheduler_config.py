"""Limits of the scheduler, checked when they are put together. Pure; frozen for the life of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.scheduling_policy import SchedulingPolicy

# So many prompts, and more than half as many as the decodes beside them, that take so many steps at most.
_BURST = 8
_BURST_STEPS = 4


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue; the names are those of the command line."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_queued_requests: int
    max_queued_tokens: int
    long_prefill_token_threshold: int = 0
    # Tokens of prompts in a step that also decodes; 0 = no limit but the budget.
    prefill_tokens_beside_decodes: int = 0
    enable_chunked_prefill: bool = True
    watermark: float = 0.0
    # Admit a request only when all of its known tokens fit, not only its first chunk.
    reserve_full_prompt: bool = True
    # Most prompts that are computed in part at the end of a step; 0 = no limit.
    max_num_partial_prefills: int = 0
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FAIR
    client_classes: ClientClasses = field(default_factory=ClientClasses)

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs})"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_model_len "
                f"({self.max_model_len}): without chunked prefill a full-length prompt would never be scheduled"
            )

    def prefill_budget(self, num_decodes: int, num_requests: int, num_waiting_tokens: int) -> int:
        """Prompts share a step with decodes in small parts alone, so that no token waits for a whole prompt.

        Beside more decodes than that the part has as many tokens as they: the step's time about doubles at most. Where
        prompts are many beside the decodes, whose tokens are then few, the parts grow with their number, and a burst
        takes the whole step: else its first tokens would be those that wait, and its requests would end one after the
        other, the last ones in small batches. A burst is over in a few steps; a queue that is longer is none.
        """
        limit = self.prefill_tokens_beside_decodes
        if num_decodes == 0 or limit == 0 or not self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        # Each decode has its token, also where prompts come before it.
        most = max(1, self.max_num_batched_tokens - num_decodes)
        # Those that may run: the others can not be begun.
        num_prompts = min(num_requests, self.max_num_seqs) - num_decodes
        is_short = num_waiting_tokens <= _BURST_STEPS * self.max_num_batched_tokens
        if num_prompts >= _BURST and 2 * num_prompts > num_decodes and is_short:
            return most
        return min(max(limit, num_decodes) * max(1, num_prompts // num_decodes), most)

    def allows_partial_prefill(self, num_partial_prefills: int) -> bool:
        """Whether a prompt may be begun without being finished in the same step, next to so many others."""
        limit = self.max_num_partial_prefills
        return self.enable_chunked_prefill and (limit == 0 or num_partial_prefills < limit)
