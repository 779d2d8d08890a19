"""Token ids to text, one token at a time: what each token adds to the text, never the same character twice.

Why not the library's own stream: it leaks the prompt when the prompt ends inside a character, its state grows while
bytes stay invalid or tokens have no text, and it has no flush.

How: a short window of the latest tokens is decoded as a whole and compared with what was sent of it, because a token's
text depends on its neighbours (characters split over tokens, spaces dropped at the start). The window is cut as soon
as its tail alone decodes to the same text, so the cost of a token does not grow with the answer. Where tokens spell
bytes, one that is whole characters needs none of this: its text does not depend on its neighbours.

Pure and owned by one choice. Never raises for an id without a token: such ids have no text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from frontend.tokenizer import Tokenizer

# What the decoder shows for bytes that are no character, or no character yet.
REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 3 of them can be waiting for the rest.
_MAX_UNFINISHED = 3
# Tokens of the prompt that the first output token may depend on.
_MAX_PROMPT_TOKENS = 8
# The window is cut to _KEEP_TOKENS when it grows beyond _MAX_WINDOW; _HARD_WINDOW holds even if no cut is clean.
_KEEP_TOKENS = 4
_MAX_WINDOW = 8
_HARD_WINDOW = 64
_CUT_TRIES = 4


class Detokenizer:
    """Incremental decoder of one choice, primed with a bounded suffix of the prompt."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._plain_texts = tokenizer.plain_texts
        self._max_token_id = tokenizer.max_token_id
        # Left out before decoding, so that they cannot separate neighbours; a full decode does the same.
        self._hidden_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._text = ""
        # Characters of `_text` that were sent, or belong to the prompt.
        self._num_sent = 0
        # Tokens of the window all of whose text was sent.
        self._num_safe = 0
        # Until something is sent: the prompt's text, when its last character may go on in the output.
        self._open_prompt: str | None = None
        self._prime(prompt_token_ids)

    def copy(self) -> Detokenizer:
        """Another decoder that stands at the same place."""
        other = copy.copy(self)
        other._window = list(self._window)
        return other

    @property
    def has_unfinished(self) -> bool:
        """Bytes are waiting for the rest of their character."""
        return self._num_sent < len(self._text) or self._open_prompt is not None

    def step(self, token_id: int) -> str:
        """The text this token completes; empty while a character is unfinished."""
        piece = self.step_plain(token_id)
        if piece:
            return piece
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        try:
            is_consistent = self._update()
        # The decoder raises plain Exception. One more try with fewer tokens; the second failure is the caller's.
        except Exception:
            is_consistent = False
        if not is_consistent:
            self._rebuild()
        piece = self._send(len(self._text) - _num_unfinished(self._text))
        if len(self._window) > _MAX_WINDOW:
            self._cut_window()
        return piece

    def step_plain(self, token_id: int) -> str:
        """The same for a token that can be told without decoding; empty, and nothing has changed, for any other."""
        piece = self._plain_texts[token_id]
        if not piece or token_id in self._hidden_ids or self.has_unfinished:
            return ""
        # Nothing before it is needed any more.
        self._window[:] = (token_id,)
        self._text = piece
        self._num_sent = len(piece)
        self._num_safe = 1
        return piece

    def flush(self) -> str:
        """The rest: bytes that never became a character show as replacement characters."""
        return self._send(len(self._text))

    def _prime(self, prompt_token_ids: Sequence[int]) -> None:
        """Take the end of the prompt as if it had been sent."""
        recent = prompt_token_ids[-2 * _MAX_PROMPT_TOKENS :]
        suffix = [token_id for token_id in recent if self._has_text(token_id)][-_MAX_PROMPT_TOKENS:]
        for token_id in suffix[self._first_clean_start(suffix) :]:
            self.step(token_id)
        if self._num_sent < len(self._text):
            self._num_sent, self._open_prompt = len(self._text), self._text

    def _first_clean_start(self, token_ids: list[int]) -> int:
        """A place near the start that is not inside a character: some decoders spoil all bytes after half of one."""
        for start in range(min(_MAX_UNFINISHED + 1, len(token_ids))):
            for end in range(start + 1, start + _MAX_UNFINISHED + 2):
                if REPLACEMENT not in self._decode(token_ids[start:end]):
                    return start
        return 0

    def _has_text(self, token_id: int) -> bool:
        return 0 <= token_id <= self._max_token_id and token_id not in self._hidden_ids

    def _decode(self, token_ids: list[int]) -> str:
        # Hidden ids never enter the window, so nothing is left to skip.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _update(self) -> bool:
        """Decode the window again; False when text that was sent has changed."""
        text = self._decode(self._window)
        if self._open_prompt is not None:
            # Unfinished bytes of the prompt become part of a character of the output, or stay with the prompt.
            self._num_sent = _num_common(self._open_prompt, text)
            is_consistent = self._num_sent >= len(self._open_prompt) - _num_unfinished(self._open_prompt)
        else:
            is_consistent = text.startswith(self._text[: self._num_sent])
        self._text = text
        return is_consistent

    def _rebuild(self) -> None:
        """Start again after the last token whose text was sent in full."""
        self._replace_window(self._num_safe)
        self._text = self._decode(self._window)
        self._num_sent = 0

    def _send(self, end: int) -> str:
        if end > self._num_sent:
            piece = self._text[self._num_sent : end]
            self._num_sent = end
            self._open_prompt = None
        else:
            piece = ""
        if self._num_sent == len(self._text):
            self._num_safe = len(self._window)
        return piece

    def _cut_window(self) -> None:
        """Drop the oldest tokens, at a border where the rest decodes to the same text and still has sent text."""
        latest = len(self._window) - _KEEP_TOKENS
        # The prompt is still needed for comparison while its last character is open.
        num_tries = _CUT_TRIES if self._open_prompt is None else 0
        for start in range(latest, max(latest - num_tries, 0), -1):
            tail = self._decode(self._window[start:])
            num_sent = self._num_sent - (len(self._text) - len(tail))
            if num_sent > 0 and self._text.endswith(tail):
                self._replace_window(start)
                self._text, self._num_sent = tail, num_sent
                return
        if len(self._window) > _HARD_WINDOW:
            self._force_cut(latest)

    def _force_cut(self, start: int) -> None:
        """No clean border, as in endless garbage: keep memory bounded and the number of unsent characters right."""
        num_unsent = len(self._text) - self._num_sent
        self._replace_window(start)
        self._text = self._decode(self._window)
        self._num_sent = max(len(self._text) - num_unsent, 0)

    def _replace_window(self, start: int) -> None:
        del self._window[:start]
        self._num_safe = max(self._num_safe - start, 0)
        self._open_prompt = None


def _num_common(first: str, second: str) -> int:
    """Length of the common start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _num_unfinished(text: str) -> int:
    """Trailing characters that later bytes may still change."""
    if not text.endswith(REPLACEMENT):
        return 0
    return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_UNFINISHED)
