"""The exact bytes behind a token id: half of a character, or a leading space, where its text would lie.

A vocabulary spells bytes in one of a few ways, and the tokenizer's decoder says which. Thread-safe; grows by what was
asked for, at most to the size of the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of single tokens; an id without a token has none."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}
        steps = list(_steps(backend.decoder))
        kinds = {step["type"] for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        # The text of a sequence is then that of its bytes, one token after the other.
        self.is_byte_level_only = [step["type"] for step in steps] == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in kinds
        # (what the vocabulary writes, what it stands for)
        self._replacements = [pair for step in steps for pair in _replacements(step)]

    def of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for written, meant in self._replacements:
            token = token.replace(written, meant)
        return token.encode()


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """The parts of a decoder, by the only way the library shows them: its pickled state, which is JSON."""
    if decoder is None:
        return
    pending: list[dict[str, Any]] = [json.loads(decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = [*step["decoders"], *pending]
        else:
            yield step


def _replacements(step: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if step["type"] == "Replace" and "String" in step["pattern"]:
        yield step["pattern"]["String"], step["content"]
    elif step["type"] == "Metaspace":
        yield step["replacement"], " "
    elif step["type"] == "WordPiece":
        yield step["prefix"], ""
    elif step["type"] == "BPEDecoder":
        yield step["suffix"], " "


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write printable Latin-1 as itself, and the other bytes as the characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()
