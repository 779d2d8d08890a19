"""The base of the parsers: a text that comes in pieces, read one character after another.

A parser is a generator that asks for the next character and says what the text before it was; so it reads like a parser
of a whole text. What it has asked for and not yet spoken of is held back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from contextlib import suppress
from typing import TypeVar

from frontend.output_parsers.interface import (
    ContentDelta,
    OutputDelta,
    ParserOptions,
    ReasoningDelta,
    ToolCallDelta,
)

T = TypeVar("T")
# More white space than that is content, whatever comes behind it: a model that writes nothing else is heard of.
_MOST_SPACE = 1000
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

    @property
    def num_reasoning_chars(self) -> int:
        """Whatever is reasoning was taken out before."""
        return 0

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
            # White space before what may become a mark is looked at once, however much of it there is.
            start = len(self._held) - len(self._held.lstrip())
            while (rest := self._held[start:]) and not _may_become(rest, marks):
                self._hand_out(start + 1)
                start = len(self._held) - len(self._held.lstrip())
            if rest in marks:
                return rest
            character = yield from self.next()
            while not rest and character.isspace():
                if len(self._held) >= _MOST_SPACE:
                    self._hand_out(len(self._held))
                character = yield from self.next()

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
            # All of it but the character that showed it was announced; that one may begin something else.
            self._held = self._held[-1:]
            self._is_in_call = False
        else:
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
        with suppress(_EndOfText):
            yield from self.read()
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
    runs: list[list[OutputDelta]] = []
    for delta in deltas:
        if runs and _goes_on(runs[-1][-1], delta):
            runs[-1].append(delta)
        else:
            runs.append([delta])
    return [run[0] if len(run) == 1 else _whole(run) for run in runs]


def _goes_on(first: OutputDelta, second: OutputDelta) -> bool:
    if isinstance(second, ToolCallDelta):
        return isinstance(first, ToolCallDelta) and first.index == second.index and not second.id
    return type(first) is type(second)


def _whole(run: list[OutputDelta]) -> OutputDelta:
    first = run[0]
    if isinstance(first, ToolCallDelta):
        arguments = "".join(delta.arguments for delta in run if isinstance(delta, ToolCallDelta))
        return ToolCallDelta(first.index, first.id, first.name, arguments)
    text = "".join(delta.text for delta in run if not isinstance(delta, ToolCallDelta))
    return ContentDelta(text) if isinstance(first, ContentDelta) else ReasoningDelta(text)


def _may_become(text: str, marks: Collection[str]) -> bool:
    return any(mark.startswith(text) for mark in marks)
