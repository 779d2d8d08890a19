"""What a parser of a model's text hands out, and how it is fed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """`id` and `name` are in the first delta of a call only; `arguments` is a fragment of JSON text to be appended."""

    index: int
    id: str
    name: str
    arguments: str


OutputDelta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool in force; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Names as in choice.py; None = that part of the text is not looked at."""

    tool_parser: str | None
    reasoning_parser: str | None
    # The prompt has opened the reasoning already.
    reasoning_open: bool
    tool_call_id: Callable[[], str]
    # For families that do not write arguments as JSON.
    tools: tuple[ToolSchema, ...] = ()


class OutputParser(Protocol):
    """One per choice, fed in order. How the text is cut makes no difference to what comes out in all.

    Nothing in a text is an error: what does not become a call is content.
    """

    @property
    def tool_calls(self) -> int:
        """Calls that have begun so far."""

    @property
    def num_reasoning_chars(self) -> int | None:
        """Characters of the text that are reasoning, with its marks and the space in it; None while that is unknown."""

    def feed(self, text: str) -> list[OutputDelta]:
        """What is certain now. Text is held back only as long as it can still become a mark or a call."""

    def finish(self) -> list[OutputDelta]:
        """The text has ended: what was held back."""
