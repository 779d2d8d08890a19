"""What the span of one call shows of its generations: several prompts of one call are several of them.

Owner: the task of the call; its generations may be tasks of their own on the same event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend.generation_events import Timings, Usage

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """One generation that an engine had. `duration_s` is from its arrival, in seconds."""

    # One for each choice.
    finish_reasons: Sequence[str]
    usage: Usage
    timings: Timings
    duration_s: float


class CallTrace:
    """`begin` with each generation, `end` where it ends, `attributes` when all have ended."""

    def __init__(self) -> None:
        # None = it has not ended, or never reached an engine.
        self._ends: list[GenerationEnd | None] = []

    def begin(self) -> int:
        """Returns what `end` asks for."""
        self._ends.append(None)
        return len(self._ends) - 1

    def end(self, index: int, end: GenerationEnd) -> None:
        self._ends[index] = end

    def attributes(self) -> dict[str, AttributeValue]:
        """Counts are sums. Durations of several generations overlap, and are those of no request: they are left out."""
        ends = [end for end in self._ends if end is not None]
        if not ends:
            return {}
        return {
            "gen_ai.response.finish_reasons": [reason for end in ends for reason in end.finish_reasons],
            **_usage_attributes([end.usage for end in ends]),
            "stepwire.preemptions": sum(end.timings.preemptions for end in ends),
            **(_latency_attributes(ends[0].timings, ends[0].duration_s) if len(self._ends) == 1 else {}),
        }


CURRENT_CALL: ContextVar[CallTrace | None] = ContextVar("current_call", default=None)


def _usage_attributes(usages: Sequence[Usage]) -> dict[str, AttributeValue]:
    """Newer names and older ones, same numbers."""
    num_prompt = sum(usage.prompt_tokens for usage in usages)
    num_completion = sum(usage.completion_tokens for usage in usages)
    return {
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": num_completion,
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.completion_tokens": num_completion,
        "stepwire.cached_prompt_tokens": sum(usage.cached_prompt_tokens for usage in usages),
    }


def _latency_attributes(timings: Timings, duration_s: float) -> dict[str, AttributeValue]:
    """Seconds; a time that was not reached is left out.

    The first is of this process's clock with the last, the others are differences of the engine's.
    """
    found = {
        "time_to_first_token": timings.ttft_ns,
        "time_in_queue": timings.queued_ns,
        "time_in_model_prefill": timings.prefill_ns,
        "time_in_model_decode": timings.decode_ns,
        # An answer of one token has no decode.
        "time_in_model_inference": timings.prefill_ns and timings.prefill_ns + timings.decode_ns,
    }
    known: dict[str, AttributeValue] = {
        f"gen_ai.latency.{name}": duration_ns / _NS_PER_S for name, duration_ns in found.items() if duration_ns
    }
    return {**known, "gen_ai.latency.e2e": duration_s}
