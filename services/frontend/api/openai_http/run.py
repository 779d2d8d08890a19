"""One prompt of a call from the door to its end: what completions and chats do alike.

Owner: a task of its own, on the event loop. Whatever is written is written inside of the generation's time limit, so
that a client that does not read is cut as on gRPC.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from frontend.api.answering import caller_of, client_class_of
from frontend.api.load_report import LoadFormat, load_format_of
from frontend.api.logprobs_messages import MAX_ENTRIES_ON_LOOP
from frontend.api.openai_http.call import HttpCall
from frontend.generation import Generation
from frontend.generation_events import FinishReason, StopMatch, Usage
from frontend.llm_frontend import LLMFrontend

Choice = dict[str, Any]
# Takes the parts of choices that are new.
Write = Callable[["Run[Any]", list[Choice]], Awaitable[None]]
Event = TypeVar("Event")

_REASONS = {FinishReason.CANCELLED.value: "abort"}


class Run(ABC, Generic[Event]):
    """`run` once. `first_choice` is the index of its first choice among those of the whole answer."""

    generation: Generation
    # The load report that the caller has asked for.
    load_format: LoadFormat | None = None

    def __init__(self, frontend: LLMFrontend, call: HttpCall, request_id: str, first_choice: int) -> None:
        self.call = call
        self.request_id = request_id
        self.first_choice = first_choice
        self._frontend = frontend

    async def run(self, write: Write) -> None:
        """Generate, and write what comes. Raises StepwireError."""
        self.load_format = load_format_of(self.call)
        async with self._frontend.generation(
            self.request_id, caller=caller_of(self.call), client_class=client_class_of(self.call), deadline_in_s=None
        ) as generation:
            self.generation = generation
            await self.submit()
            while events := await self.next():
                choices = await self._choices(events)
                if choices:
                    await write(self, choices)
                    generation.tokens_emitted += sum(getattr(event, "num_tokens", 0) for event in events)

    async def _choices(self, events: Sequence[Event]) -> list[Choice]:
        if self.num_entries(events) > MAX_ENTRIES_ON_LOOP:
            # It would hold up all other streams.
            return await asyncio.to_thread(lambda: list(self.to_choices(events)))
        return list(self.to_choices(events))

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        return self.generation.usage

    @property
    def num_reasoning_tokens(self) -> int:
        """Part of the completion tokens."""
        return 0

    @abstractmethod
    async def submit(self) -> None:
        """Send it to an engine."""

    @abstractmethod
    async def next(self) -> Sequence[Event]:
        """The next events; none at the end."""

    @abstractmethod
    def num_entries(self, events: Sequence[Event]) -> int:
        """Log-probabilities among them."""

    @abstractmethod
    def to_choices(self, events: Sequence[Event]) -> Iterator[Choice]:
        """What they add to choices, as a stream shows it."""


def finish_reason(value: str) -> str:
    """OpenAI has no word for the others."""
    return _REASONS.get(value, value)


def stop_reason(match: StopMatch | None) -> str | int | None:
    """vLLM's: the stop string, or the stop token; None for the model's own end."""
    if match is None:
        return None
    return match.stop_string if match.stop_string is not None else match.stop_token_id
