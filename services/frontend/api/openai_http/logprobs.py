"""Log-probabilities in the two shapes of OpenAI: parallel lists in completions, one object a token in chats. Pure.

Each object is of one choice and takes its rows in order: a token that is part of a character has text only together
with the tokens before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from frontend.detokenizer import REPLACEMENT
from stepwire.v1.common_pb2 import Logprob, TokenLogprobs

# JSON has no minus infinity; this is what OpenAI writes for it.
LEAST = -9999.0

_Decoder = codecs.getincrementaldecoder("utf-8")


class TokenTexts:
    """Texts of tokens that may come next, after those that were taken."""

    def __init__(self) -> None:
        # The last bytes that were taken and are no character yet, at most 3.
        self._unfinished = b""

    def text_of(self, token_bytes: bytes) -> str:
        """The text that a token shows; empty while its character is unfinished, or when it never was one."""
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            text, _ = self._decode(token_bytes)
            return text if text.strip(REPLACEMENT) else ""

    def take(self, token_bytes: bytes) -> str:
        """This one has come; returns all that the whole text has more of now."""
        text, self._unfinished = self._decode(token_bytes)
        return text

    def _decode(self, token_bytes: bytes) -> tuple[str, bytes]:
        decoder = _Decoder("replace")
        return decoder.decode(self._unfinished + token_bytes), decoder.getstate()[0]


class ChatLogprobs:
    """Of one choice."""

    def __init__(self) -> None:
        self._texts = TokenTexts()

    def of(self, rows: Iterable[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._row(row) for row in rows], "refusal": None}

    def _row(self, row: TokenLogprobs) -> dict[str, Any]:
        shown = {**self._entry(row.sampled), "top_logprobs": [self._entry(top) for top in row.top]}
        self._texts.take(row.sampled.token_bytes)
        return shown

    def _entry(self, given: Logprob) -> dict[str, Any]:
        text = self._texts.text_of(given.token_bytes)
        return {"token": text, "logprob": _value(given), "bytes": list(given.token_bytes)}


class CompletionLogprobs:
    """Of one choice; counts the characters before each token."""

    def __init__(self) -> None:
        self._offset = 0
        self._texts = TokenTexts()

    def of(self, rows: Iterable[TokenLogprobs], first_token: bytes | None = None) -> dict[str, Any]:
        """`first_token`: the first row has no log-probability, because nothing precedes its token."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for row in rows:
            is_first = first_token is not None and not lists["tokens"]
            token_bytes = row.sampled.token_bytes if first_token is None or not is_first else first_token
            lists["tokens"].append(self._texts.text_of(token_bytes))
            lists["token_logprobs"].append(None if is_first else _value(row.sampled))
            lists["top_logprobs"].append(None if is_first else self._top(row))
            lists["text_offset"].append(self._offset)
            self._offset += len(self._texts.take(token_bytes))
        return lists

    def _top(self, row: TokenLogprobs) -> dict[str, float]:
        """The most likely, and the token itself, which wins over others with the same text."""
        top = {self._texts.text_of(entry.token_bytes): _value(entry) for entry in reversed(row.top)}
        return top | {self._texts.text_of(row.sampled.token_bytes): _value(row.sampled)}


def _value(given: Logprob) -> float:
    return max(given.logprob, LEAST)
