"""Reasoning between <think> and </think>, before what a tool parser reads. White space around it is dropped."""

from __future__ import annotations

from frontend.output_parsers.interface import ContentDelta, OutputDelta, OutputParser, ReasoningDelta

_BEGIN, _END = "<think>", "</think>"


class ReasoningParser:
    """Implements `OutputParser`. Text behind the reasoning goes to `inner`; None: it is content."""

    def __init__(self, inner: OutputParser | None, *, is_open: bool) -> None:
        """is_open: the answer begins inside, whether or not it says so."""
        self._inner = inner
        self._is_open = is_open
        # What may yet be a mark, or white space that may yet be the last of its part.
        self._held = ""
        self._is_at_start = True
        self._is_behind_mark = False
        self._is_over = False
        # No content has come yet behind the reasoning.
        self._skips_space = False

    @property
    def tool_calls(self) -> int:
        return 0 if self._inner is None else self._inner.tool_calls

    @property
    def is_undecided(self) -> bool:
        """What came so far may be the mark, or content from the beginning."""
        return self._is_at_start and not self._is_open and not self._is_over

    def feed(self, text: str) -> list[OutputDelta]:
        if self._is_over:
            return self._feed_inner(text)
        self._held += text
        deltas: list[OutputDelta] = []
        if self._is_at_start and not self._start():
            return [] if not self._is_over else self._pass_on()
        if _END in self._held:
            reasoning, _, rest = self._held.partition(_END)
            deltas += _reasoning(reasoning.rstrip())
            self._is_over, self._held, self._skips_space = True, rest, True
            return [*deltas, *self._pass_on()]
        # White space before the mark is dropped with it.
        kept = len(_without_mark(self._held, _END).rstrip())
        deltas += _reasoning(self._held[:kept])
        self._held = self._held[kept:]
        return deltas

    def finish(self) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        if not self._is_over:
            self._is_over = True
            if self._is_at_start and not self._is_open:
                deltas = self._pass_on()
            else:
                deltas, self._held = _reasoning(self._held.rstrip()), ""
        return deltas if self._inner is None else [*deltas, *self._inner.finish()]

    def _start(self) -> bool:
        """Skip white space and the mark in front; False while the first word is not known, or when it is content."""
        first = self._held.lstrip()
        if not first or (not self._is_behind_mark and _BEGIN.startswith(first) and first != _BEGIN):
            return False
        if not self._is_behind_mark and first.startswith(_BEGIN):
            self._is_behind_mark = self._is_open = True
            first = first.removeprefix(_BEGIN).lstrip()
            if not first:
                # White space behind the mark may go on in the next piece.
                self._held = ""
                return False
        if not self._is_open:
            self._is_over = True
            return False
        self._held, self._is_at_start = first, False
        return True

    def _pass_on(self) -> list[OutputDelta]:
        held, self._held = self._held, ""
        return self._feed_inner(held)

    def _feed_inner(self, text: str) -> list[OutputDelta]:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        if not text:
            return []
        return [ContentDelta(text)] if self._inner is None else self._inner.feed(text)


def _reasoning(text: str) -> list[OutputDelta]:
    return [ReasoningDelta(text)] if text else []


def _without_mark(text: str, mark: str) -> str:
    """The text without an end that may become the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length]
    return text
