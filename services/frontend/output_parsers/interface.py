"""What a parser of a model's text hands out, and how it is fed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    index: int
    id: str
    name: str
    arguments: str


OutputDelta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    def feed(self, text: str) -> list[OutputDelta]: ...

    def finish(self) -> list[OutputDelta]: ...

    @property
    def tool_calls(self) -> int: ...
