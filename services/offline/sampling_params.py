"""What a caller asks for besides the prompt, under vLLM's names. Values without checks: those are the frontend's.

None always means what an unset field means to the service: the model's own default, or no limit.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class RequestOutputKind(enum.Enum):
    """What `LLMEngine.step` hands out of a request; `LLM` always takes FINAL_ONLY."""

    # Everything so far, whenever there is more.
    CUMULATIVE = "cumulative"
    # What is new.
    DELTA = "delta"
    # Once, when every choice has ended.
    FINAL_ONLY = "final_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the generated text; exactly one is set."""

    # JSON Schema, as text or as the object itself.
    json: str | Mapping[str, object] | None = None
    # Any JSON object.
    json_object: bool = False
    regex: str | None = None
    # EBNF.
    grammar: str | None = None
    choice: Sequence[str] | None = None
    # The description as text or as the object itself.
    structural_tag: str | Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Of one request. The ranges are those of the service: `stepwire.v1.SamplingParams` and its neighbours."""

    n: int = 1
    # 0 = greedy.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    # Choice i uses seed + i; None = drawn.
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()

    # None = all the room left in the context.
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    # k = the k most likely besides the token itself, -1 = the whole vocabulary if the engine allows it.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    # Keep the last k prompt tokens; -1 = as many as fit.
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
