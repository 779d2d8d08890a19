"""Tokens that mean the same text wherever they stand: whole characters, in a vocabulary that spells bytes.

Nearly every token of an answer is one, and needs no decoding. Grows by what was asked for, at most to the size of the
vocabulary. Shared by all choices; thread-safe.
"""

from __future__ import annotations

from frontend.token_bytes import TokenBytes

# Stands for bytes that are no character; the same character in earnest is left to the decoder.
_REPLACEMENT = "\ufffd"


class PlainTexts(dict[int, str]):
    """Text by token id; empty = only the decoder can tell. A dict, because it is asked for every token."""

    def __init__(self, token_bytes: TokenBytes, max_token_id: int) -> None:
        super().__init__()
        self._token_bytes = token_bytes
        self._max_token_id = max_token_id

    def __missing__(self, token_id: int) -> str:
        if not 0 <= token_id <= self._max_token_id:
            return ""
        text = self[token_id] = self._text_of(token_id)
        return text

    def _text_of(self, token_id: int) -> str:
        if not self._token_bytes.is_byte_level_only:
            return ""
        try:
            text = self._token_bytes.of(token_id).decode()
        except UnicodeDecodeError:
            return ""
        return "" if _REPLACEMENT in text else text
