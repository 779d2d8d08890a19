"""Answers as callers get them, under vLLM's names. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.generation_events import Usage
from stepwire.errors import StepwireError


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position; the rank of a chosen token outside the most likely is not known."""

    logprob: float
    rank: int | None
    # Half of a character is possible.
    token_bytes: bytes

    @property
    def decoded_token(self) -> str:
        """Its text as far as it is one."""
        return self.token_bytes.decode(errors="replace")


# By token id, the position's own token first.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `finish_reason` is None while it goes on, else stop, length or repetition."""

    index: int
    text: str
    token_ids: list[int]
    # Both if asked for.
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    # The stop string or the stop token that ended it; None at the end of sequence.
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request. With an `error` it is over, and `outputs` hold what came before."""

    request_id: str
    # None if ids were given.
    prompt: str | None
    prompt_token_ids: list[int]
    # If asked for; the first token has none.
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    usage: Usage
    error: StepwireError | None = None
