"""What the engine client hands to the output processor: the news of one request, free of protobuf.

Made by `engine_client`, read by `output_processor`; both run on the event loop.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stepwire.errors import StepwireError
from stepwire.packed_logprobs import PackedLogprobs


class EngineFinishReason(enum.Enum):
    """Why the engine ended a request; the same words as on the wire."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"
    REJECTED = "rejected"
    REPETITION = "repetition"


class EngineEvent(enum.Enum):
    """What happened to a request inside the engine."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    FIRST_TOKEN = "first_token"


@dataclass(frozen=True, slots=True)
class EngineFinish:
    """The request is over. `error` is set with ERROR and REJECTED only; `stop_token_id` is None at end of sequence."""

    reason: EngineFinishReason
    stop_token_id: int | None = None
    error: StepwireError | None = None
    preemptions: int = 0


class EngineOutput(NamedTuple):
    """News of one handle from one step. Times are the engine's monotonic clock in ns; never mixed with our own.

    A tuple, because there is one for every token.
    """

    handle: int
    new_token_ids: Sequence[int] = ()
    finish: EngineFinish | None = None
    # (event, engine monotonic ns), in order
    events: tuple[tuple[EngineEvent, int], ...] = ()
    # Prompt tokens found in the prefix cache; on the first scheduling only.
    cached_prompt_tokens: int | None = None
    monotonic_ns: int = 0
    # One row for each new token.
    logprobs: PackedLogprobs | None = None
    # The next rows of the prompt.
    prompt_logprobs: PackedLogprobs | None = None
    # The answer to a request that pools, with its finish: float32, little-endian.
    pooled: bytes = b""

    @property
    def has_news(self) -> bool:
        """There is more in it than tokens and their log-probabilities."""
        return bool(self.events) or self.finish is not None or self.cached_prompt_tokens is not None


class TracedEvent(NamedTuple):
    """What happened to one choice, when by the engine's clock, and why it ended if it did."""

    monotonic_ns: int
    choice: int
    name: str
    reason: str = ""


def traced_events(choice: int, output: EngineOutput) -> Iterator[TracedEvent]:
    """Those of one output, as a trace names them."""
    for event, stamp in output.events:
        yield TracedEvent(stamp, choice, event.name)
    if output.finish is not None:
        yield TracedEvent(output.monotonic_ns, choice, "FINISHED", output.finish.reason.value)
