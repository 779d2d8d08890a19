"""Stop strings: finding them in text that arrives in pieces, and holding back text that may turn out to be one.

Pure. Both classes are fed one token at a time, so their answers do not depend on how the engine batches its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

# A character has at most four tokens. Endless garbage looks like one that never ends, and must still flow.
_MAX_GROUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string was found; `num_excess_chars` of the text fed so far must be cut off its end."""

    stop: str
    num_excess_chars: int


class StopMatcher:
    """Finds the first listed stop string that a piece of text completes."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._num_tail_chars = max((len(stop) for stop in stops), default=1) - 1
        self._tail = ""

    @property
    def num_held_chars(self) -> int:
        """How much of the latest text may still be cut by a later hit."""
        return 0 if self._include_stop else self._num_tail_chars

    def feed(self, piece: str) -> StopHit | None:
        """Search the borders where a stop could end inside `piece`; older text was searched before."""
        text = self._tail + piece
        self._tail = text[-self._num_tail_chars :] if self._num_tail_chars else ""
        for stop in self._stops:
            found = text.find(stop, max(0, len(text) - len(piece) - len(stop) + 1))
            if found >= 0:
                end = found + len(stop) if self._include_stop else found
                return StopHit(stop, len(text) - end)
        return None


class HeldTokens:
    """The latest tokens with their text, kept until enough text follows. Leaves in whole tokens: ids and text agree.

    Tokens that share a character form one group, which is never divided.
    """

    def __init__(self, num_held_chars: int) -> None:
        self._num_held_chars = num_held_chars
        self._groups: deque[tuple[tuple[int, ...], str]] = deque()
        # Of all groups, the open one included.
        self._num_chars = 0
        # The group whose last character is unfinished.
        self._open_ids: list[int] = []
        self._open_text = ""

    @property
    def is_empty(self) -> bool:
        return not (self._groups or self._open_ids)

    def append(self, token_id: int, piece: str, *, is_unfinished: bool) -> None:
        self._open_ids.append(token_id)
        self._open_text += piece
        self._num_chars += len(piece)
        if not is_unfinished or len(self._open_ids) >= _MAX_GROUP_TOKENS:
            self._close_group()

    def append_rest(self, piece: str) -> None:
        """Text of tokens that are here already, known only now that no more will come."""
        self._open_text += piece
        self._num_chars += len(piece)
        self._close_group()

    def release(self) -> tuple[str, list[int]]:
        """Text and ids that no later hit can cut."""
        pieces: list[str] = []
        token_ids: list[int] = []
        groups = self._groups
        while groups and self._num_chars - len(groups[0][1]) >= self._num_held_chars:
            ids, piece = groups.popleft()
            self._num_chars -= len(piece)
            pieces.append(piece)
            token_ids.extend(ids)
        return "".join(pieces), token_ids

    def cut(self, num_excess_chars: int) -> None:
        """Drop text from the end, and with it the tokens that have no character left."""
        self._close_group()
        num_kept = self._num_chars - num_excess_chars
        while self._groups:
            ids, piece = self._groups.pop()
            self._num_chars -= len(piece)
            if self._num_chars < num_kept:
                kept = piece[: num_kept - self._num_chars]
                self._groups.append((ids, kept))
                self._num_chars += len(kept)
                return

    def drain(self) -> tuple[str, list[int]]:
        """Everything that is left."""
        self._close_group()
        self._num_held_chars = 0
        return self.release()

    def _close_group(self) -> None:
        if self._open_ids or self._open_text:
            self._groups.append((tuple(self._open_ids), self._open_text))
            self._open_ids.clear()
            self._open_text = ""
