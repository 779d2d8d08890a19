"""What a handler gets from an OutputCollector: admission, new output, ends, counts and durations. Frozen values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from stepwire.packed_logprobs import PackedLogprobs


class FinishReason(enum.Enum):
    """Why a choice ended. There is no error value: an error ends the whole request as an exception."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REPETITION = "repetition"


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What ended a choice with STOP; exactly one is set."""

    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The engine has queued every choice. Always the first item."""


@dataclass(frozen=True, slots=True)
class PromptReady:
    """The prefill has ended and log-probabilities of the prompt were asked for. Comes at most once, after Admitted.

    `logprobs` are the rows of all prompt tokens but the first, in parts.
    """

    logprobs: tuple[PackedLogprobs, ...]
    cached_prompt_tokens: int


class ChoiceDelta(NamedTuple):
    """New output of one choice since its last delta; never cumulative.

    `num_tokens` counts the output tokens behind it, also when ids were not asked for; an echoed prompt is not counted.
    A tuple, because there is one for nearly every token.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    # If asked for: one row for each output token, `num_tokens` of them.
    logprobs: PackedLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """A choice has ended; its last item. `num_output_tokens` leaves out what was resumed."""

    choice: int
    reason: FinishReason
    stop_match: StopMatch | None
    num_output_tokens: int
    # The vector of a request that pools, which is all of its answer: float32, little-endian.
    pooled: bytes = b""


CollectorItem = Admitted | PromptReady | ChoiceDelta | ChoiceFinished


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, summed over its choices; the prompt counts once, resumed output not at all."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one request. All but `ttft_ns` (frontend clock) are differences of engine stamps; 0 = unknown."""

    queued_ns: int
    prefill_ns: int
    decode_ns: int
    ttft_ns: int
    preemptions: int
