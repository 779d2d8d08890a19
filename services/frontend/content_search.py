"""Stop strings in what the caller sees as content: what a reasoning parser takes out of the text is not searched.

Pure. Owned by one choice, and fed one token at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from frontend.output_parsers.interface import ContentDelta, OutputDelta
from frontend.output_parsers.reasoning import ReasoningParser
from frontend.stop_strings import StopHit, StopMatcher


class ContentSearch:
    """`reasoning`, without a parser behind it, tells which text is content; None: all of it is."""

    def __init__(self, matcher: StopMatcher, reasoning: ReasoningParser | None) -> None:
        self._matcher = matcher
        self._reasoning = reasoning
        # Text from here on back may be searched.
        self._num_searched_chars = 0

    @property
    def num_held_chars(self) -> int:
        """How much of the latest text may still be cut by a later hit, once its beginning is understood."""
        return self._matcher.num_held_chars

    @property
    def has_reasoning(self) -> bool:
        """What is content depends on the text before."""
        return self._reasoning is not None

    @property
    def is_undecided(self) -> bool:
        """All text so far may yet be content, and may then be cut."""
        return self._reasoning is not None and self._reasoning.is_undecided

    def feed(self, piece: str, *, is_searched: bool) -> StopHit | None:
        """Take the text of a token. Unless `is_searched` it is only read, for the sake of what follows."""
        if is_searched:
            self._num_searched_chars += len(piece)
        content = piece if self._reasoning is None else _content(self._reasoning.feed(piece))
        return self._search(content)

    def finish(self) -> StopHit | None:
        """The text has ended, which may decide what it was."""
        return self._search(_content(self._reasoning.finish())) if self._reasoning is not None else None

    def _search(self, content: str) -> StopHit | None:
        # It is always the end of the text; its beginning may come from before the search began.
        content = content[max(0, len(content) - self._num_searched_chars) :]
        return self._matcher.feed(content) if content else None


def _content(deltas: Iterable[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
