"""What input processing must know of the model behind the engines. A frozen value, replaced when engines change."""

from __future__ import annotations

from dataclasses import dataclass, replace

DEFAULT_MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The strictest values among this frontend and its engines; `kv_cache_tokens` 0 = unknown."""

    served_model_name: str
    max_model_len: int
    vocab_size: int
    kv_cache_tokens: int = 0
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    structured_output_kinds: tuple[str, ...] = ()
    # Every engine serves by priority; others would pass over what a request asks for.
    has_priorities: bool = False
    # Length of the vectors that engines make of prompts; 0 = they do not.
    embedding_dimensions: int = 0
    # 0 for a prompt that is pooled.
    min_output_tokens: int = 1

    @property
    def longest_prompt(self) -> int:
        return self.max_model_len - self.min_output_tokens

    def without_output(self) -> ModelFacts:
        """For prompts that are pooled: they may fill the context."""
        return replace(self, min_output_tokens=0)

    def room_for_output(self, num_prompt_tokens: int) -> int:
        """Most output tokens after such a prompt: what the context leaves, and what the KV cache can hold.

        A prompt larger than the KV cache is left to the engine, which refuses it as KV_CAPACITY.
        """
        room = self.max_model_len - num_prompt_tokens
        if self.kv_cache_tokens > num_prompt_tokens:
            room = min(room, self.kv_cache_tokens - num_prompt_tokens)
        return room
