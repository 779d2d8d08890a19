"""What the sampler needs of the rows it samples: parameters as arrays, and rules of the few rows that have some.

Owner: the busy-loop thread. Rules are built once for a request; a batch is a selection of them for one step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine_core.model_executor.sampler.token_counts import TokenCounts
from engine_core.scheduler.output import NewRequestData
from engine_core.scheduler.request import SamplingParams

SAMPLING_DTYPE = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
    ]
)


# Colder than that is the arg-max, and its reciprocal has to be a float32.
_LEAST_TEMPERATURE = 1e-4


def sampling_record(sampling: SamplingParams) -> tuple[float, float, float, int, int]:
    """A row of SAMPLING_DTYPE. A negative seed is another name for the same 64 bits."""
    temperature = max(sampling.temperature, _LEAST_TEMPERATURE) if sampling.temperature > 0 else 0.0
    return (temperature, sampling.top_p, sampling.min_p, sampling.top_k, sampling.seed & (2**64 - 1))


@dataclass(frozen=True, slots=True)
class LogitsRules:
    """How one request changes its logits before a token is chosen."""

    # None = no restriction.
    allowed_token_ids: np.ndarray | None
    bad_words: tuple[tuple[int, ...], ...]
    bias_token_ids: np.ndarray
    bias_values: np.ndarray
    min_tokens: int
    min_tokens_masked_ids: np.ndarray
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def apply_after(self, num_output_tokens: int) -> bool:
        """Whether any rule still holds after that many output tokens."""
        return (
            self.allowed_token_ids is not None
            or bool(self.bad_words)
            or self.bias_token_ids.size > 0
            or self.has_penalties
            or num_output_tokens < self.min_tokens
        )

    def start_counts(self, prompt_token_ids: np.ndarray) -> TokenCounts | None:
        """What the penalties have to know; None without penalties."""
        if not self.has_penalties:
            return None
        # The other penalties look at the output only.
        return TokenCounts(prompt_token_ids if self.repetition_penalty != 1 else prompt_token_ids[:0])

    @classmethod
    def of(cls, request: NewRequestData, vocab_size: int) -> LogitsRules | None:
        """The rules of a request, or None for the many that have none. Ids outside the vocabulary rule nothing."""
        sampling = request.sampling
        bias = [(token_id, value) for token_id, value in sampling.logit_bias if token_id < vocab_size]
        rules = cls(
            allowed_token_ids=_ids(sampling.allowed_token_ids, vocab_size) if sampling.allowed_token_ids else None,
            bad_words=tuple(word for word in sampling.bad_words if max(word) < vocab_size),
            bias_token_ids=_ids(tuple(token_id for token_id, _ in bias), vocab_size),
            bias_values=np.array([value for _, value in bias], dtype=np.float32),
            min_tokens=request.min_tokens,
            min_tokens_masked_ids=_ids(request.min_tokens_masked_ids, vocab_size),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
        )
        return rules if rules.apply_after(0) else None


@dataclass(frozen=True, slots=True)
class RuledRow:
    """A row whose request has rules in force."""

    row: int
    rules: LogitsRules
    # A view of the worker's state: valid during this step only.
    output_token_ids: np.ndarray
    # Of a request with penalties.
    counts: TokenCounts | None = None


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """Rows that a grammar restricts, and the tokens it allows there."""

    # [R]
    rows: np.ndarray
    # int32 [R, ceil(V / 32)]: bit t % 32 of word t // 32 = token t is allowed.
    words: np.ndarray


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one step that need more than an arg-max: R of the B rows of the logits.

    The rows that rules and grammar name are places among these R.
    """

    # Ascending, [R].
    rows: np.ndarray
    # SAMPLING_DTYPE, [R]
    params: np.ndarray
    # Index of the output token to choose, resumed output counted, [R].
    token_indices: np.ndarray
    ruled_rows: list[RuledRow]
    grammar: GrammarRows | None = None


def _ids(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    # Stop ids come from a client or a tokenizer's config, and either may name ids the model does not have.
    return np.array([token_id for token_id in token_ids if token_id < vocab_size], dtype=np.int64)
