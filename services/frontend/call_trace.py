"""What the span of one call shows of its generations: several prompts of one call are several of them.

Owner: the task of the call; its generations may be tasks of their own on the same event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """`begin` with each generation, `note` and `end` what is known of it, `attributes` when all have ended."""

    def __init__(self) -> None:
        # That of the first generation, unless the call has a name for all of them.
        self.request_id = ""
        self._facts: list[dict[str, AttributeValue]] = []
        # None = it has not ended, or never reached an engine.
        self._ends: list[GenerationEnd | None] = []

    def begin(self, request_id: str) -> int:
        """Returns what `note` and `end` ask for."""
        self.request_id = self.request_id or request_id
        self._facts.append({})
        self._ends.append(None)
        return len(self._ends) - 1

    def note(self, index: int, facts: Mapping[str, AttributeValue]) -> None:
        """What may differ between the generations: the call shows what they have in common."""
        self._facts[index].update(facts)

    def end(self, index: int, end: GenerationEnd) -> None:
        self._ends[index] = end

    def attributes(self) -> dict[str, AttributeValue]:
        """Counts are sums. Durations of several generations overlap, and are those of no request: they are left out."""
        known: dict[str, AttributeValue] = {"gen_ai.request.id": self.request_id} if self.request_id else {}
        known |= self._common_facts()
        ends = [end for end in self._ends if end is not None]
        if ends:
            known |= {"gen_ai.response.id": self.request_id, **result_attributes(ends)}
        if ends and len(self._ends) == 1:
            known |= latency_attributes(ends[0])
        return known

    def _common_facts(self) -> dict[str, AttributeValue]:
        first, *others = self._facts or [{}]
        return {name: value for name, value in first.items() if all(facts.get(name) == value for facts in others)}


CURRENT_CALL: ContextVar[CallTrace | None] = ContextVar("current_call", default=None)


def name_call(request_id: str) -> None:
    """The call of this task makes several generations, with ids made of this one."""
    call = CURRENT_CALL.get()
    if call is not None:
        call.request_id = request_id


def result_attributes(ends: Sequence[GenerationEnd]) -> dict[str, AttributeValue]:
    """How they ended and what they used, together."""
    return {
        "gen_ai.response.finish_reasons": [reason for end in ends for reason in end.finish_reasons],
        **_usage_attributes([end.usage for end in ends]),
        "stepwire.preemptions": sum(end.timings.preemptions for end in ends),
    }


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


def latency_attributes(end: GenerationEnd) -> dict[str, AttributeValue]:
    """Seconds; a time that was not reached is left out.

    The first is of this process's clock with the last, the others are differences of the engine's.
    """
    timings = end.timings
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
    return {**known, "gen_ai.latency.e2e": end.duration_s}
