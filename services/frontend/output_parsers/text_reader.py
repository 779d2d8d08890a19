"""The base of the parsers: a text that comes in pieces, read one character after another.

A parser is a generator that asks for the next character and says what the text before it was; so it reads like a parser
of a whole text. What it has asked for and not yet spoken of is held back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from typing import TypeVar

from frontend.output_parsers.interface import (
    ContentDelta,
    OutputDelta,
    ParserOptions,
    ReasoningDelta,
    ToolCallDelta,
)

T = TypeVar("T")
# A part of a parser: takes characters, returns a T.
Reading = Generator[None, str, T]


class _EndOfText(Exception):
    pass


class NotACallError(Exception):
    """The text at hand is no call, or goes on as no call can."""


class TextReader(ABC):
    """Implements `OutputParser`; `read` is the parser."""

    # The marks of this family are special tokens, or may be in some of its tokenizers.
    keeps_special_tokens = False

    def __init__(self, options: ParserOptions) -> None:
        self._tool_call_id = options.tool_call_id
        self._num_calls = 0
        self._deltas: list[OutputDelta] = []
        # Read, and neither handed out nor dropped.
        self._held = ""
        # What is held belongs to a call that was announced: it is not content, whatever comes.
        self._is_in_call = False
        self._reading = self._read_to_the_end()
        next(self._reading)

    @property
    def tool_calls(self) -> int:
        return self._num_calls

    def feed(self, text: str) -> list[OutputDelta]:
        for character in text:
            self._reading.send(character)
        return self._take()

    def finish(self) -> list[OutputDelta]:
        self._reading.send("")
        return self._take()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Reads for ever; the end of the text ends it wherever it is."""

    # -- for `read` --------------------------------------------------------------------------------------------------

    def next(self) -> Reading[str]:
        character = yield
        if not character:
            raise _EndOfText
        self._held += character
        return character

    def after_space(self) -> Reading[str]:
        """The next character that is no white space."""
        while True:
            character = yield from self.next()
            if not character.isspace():
                return character

    def content_until(self, marks: Collection[str]) -> Reading[str]:
        """Hands out content up to one of the marks, which is held with the white space before it."""
        while True:
            while not _may_become(self._held.lstrip(), marks):
                self._hand_out(1)
            if self._held.lstrip() in marks:
                return self._held.lstrip()
            yield from self.next()

    def mark_at_once(self, marks: Collection[str]) -> Reading[str]:
        """The mark that comes next, behind white space; empty, and nothing is handed out, if there is none."""
        while self._held.lstrip() not in marks:
            if not _may_become(self._held.lstrip(), marks):
                return ""
            yield from self.next()
        return self._held.lstrip()

    def drop(self) -> None:
        """What is held was a mark or a call."""
        self._held = ""

    def give_up(self) -> None:
        """What is held is no call after all."""
        if self._is_in_call:
            # All of it but the character that showed it was announced.
            self._held = self._held[-1:]
            self._is_in_call = False
        self._hand_out(len(self._held))

    def begin_call(self, name: str) -> None:
        self._deltas.append(ToolCallDelta(self._num_calls, self._tool_call_id(), name, ""))
        self._num_calls += 1
        self._is_in_call = True

    def add_arguments(self, text: str) -> None:
        self._deltas.append(ToolCallDelta(self._num_calls - 1, "", "", text))
        self._held = ""

    def end_call(self) -> None:
        self._is_in_call = False
        self._held = ""

    # ----------------------------------------------------------------------------------------------------------------

    def _read_to_the_end(self) -> Reading[None]:
        try:
            yield from self.read()
        except _EndOfText:
            pass
        if not self._is_in_call:
            self._hand_out(len(self._held))
        # Not exhausted: the one who sends the end is not told of it by an exception.
        yield

    def _hand_out(self, count: int) -> None:
        if count:
            self._deltas.append(ContentDelta(self._held[:count]))
            self._held = self._held[count:]

    def _take(self) -> list[OutputDelta]:
        deltas, self._deltas = self._deltas, []
        return joined(deltas)


def joined(deltas: list[OutputDelta]) -> list[OutputDelta]:
    """Neighbours of one kind become one."""
    result: list[OutputDelta] = []
    for delta in deltas:
        both = _join(result[-1], delta) if result else None
        if both is None:
            result.append(delta)
        else:
            result[-1] = both
    return result


def _join(first: OutputDelta, second: OutputDelta) -> OutputDelta | None:
    match first, second:
        case ContentDelta(), ContentDelta():
            return ContentDelta(first.text + second.text)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(first.text + second.text)
        case ToolCallDelta(), ToolCallDelta(id="") if first.index == second.index:
            return ToolCallDelta(first.index, first.id, first.name, first.arguments + second.arguments)
    return None


def _may_become(text: str, marks: Collection[str]) -> bool:
    return any(mark.startswith(text) for mark in marks)
