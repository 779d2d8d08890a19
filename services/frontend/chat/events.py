"""What a handler of a chat gets: the events of a generation with their text told apart. Frozen values."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from frontend.generation_events import Admitted, StopMatch
from frontend.output_parsers.interface import ToolCallDelta
from stepwire.packed_logprobs import PackedLogprobs


class ChatFinishReason(enum.Enum):
    """Why a choice ended; an error is no event."""

    STOP = "stop"
    LENGTH = "length"
    # It would be STOP, and there are calls.
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    REPETITION = "repetition"


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """New output of one choice; never cumulative. `num_tokens` counts the tokens behind it, also with no text yet."""

    choice: int
    content: str
    reasoning: str
    # Fragments, to be appended by index.
    tool_calls: tuple[ToolCallDelta, ...]
    # If asked for.
    token_ids: tuple[int, ...]
    num_tokens: int
    logprobs: PackedLogprobs | None = None


@dataclass(frozen=True, slots=True)
class ChatFinished:
    """A choice has ended; its last event."""

    choice: int
    reason: ChatFinishReason
    stop_match: StopMatch | None


# The first event is always Admitted.
ChatEvent: TypeAlias = Admitted | ChatDelta | ChatFinished
