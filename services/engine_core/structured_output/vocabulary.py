"""The bytes behind each token id, read from the model's tokenizer.json. The one module that looks into it.

It cannot encode text: the engine core still has no tokenizer. Runs once, in the thread that starts the engine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TokenToBytes = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "▁"


class VocabularyError(Exception):
    """The model's files do not say what bytes its tokens stand for."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens[i]` are the bytes of token i; empty for special tokens and for ids without a token."""

    tokens: tuple[bytes, ...]
    # Ids of the special tokens by what they spell.
    special_token_ids: Mapping[str, int] = field(default_factory=dict)

    def spelling(self, special_tokens: Collection[str]) -> Vocabulary:
        """The same, where these special tokens have the text they spell. Raises KeyError for one that is unknown."""
        tokens = list(self.tokens)
        for name in special_tokens:
            tokens[self.special_token_ids[name]] = name.encode()
        return Vocabulary(tuple(tokens))

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little"))
            digest.update(token)
        return digest.hexdigest()


def read_vocabulary(model_path: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary of a model directory, as long as the model's rows. Raises VocabularyError."""
    path = model_path / "tokenizer.json"
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        to_bytes = _converter(description["decoder"])
        tokens = [b""] * vocab_size
        for token, token_id in _ordinary_tokens(description):
            # A tokenizer may know more ids than the model has rows; the model never says those.
            if token_id < vocab_size:
                tokens[token_id] = to_bytes(token)
        special: dict[str, int] = {}
        for added in description.get("added_tokens", []):
            if added["id"] < vocab_size:
                tokens[added["id"]] = b"" if added["special"] else to_bytes(added["content"])
                if added["special"]:
                    special[added["content"]] = added["id"]
    except OSError as error:
        raise VocabularyError(f"{path.name} can not be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"{path.name} is not understood: {type(error).__name__}: {error}") from error
    if not any(tokens):
        raise VocabularyError(f"{path.name} has no token with text")
    return Vocabulary(tuple(tokens), special)


def _ordinary_tokens(description: dict[str, Any]) -> Iterator[tuple[str, int]]:
    vocab = description["model"]["vocab"]
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:
        # Unigram: (token, score) in order of ids.
        yield from ((entry[0], token_id) for token_id, entry in enumerate(vocab))


def _converter(decoder: dict[str, Any] | None) -> TokenToBytes:
    """How the decoder turns one token inside a text into bytes."""
    steps = list(_decoder_steps(decoder))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _from_byte_level
    if kinds & {"ByteFallback", "Metaspace"} or any(_replaces_metaspace(step) for step in steps):
        return _from_metaspace
    raise ValueError(f"its decoder is {', '.join(sorted(kinds)) or 'missing'}")


def _decoder_steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
    else:
        yield decoder


def _replaces_metaspace(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Replace" and step["pattern"] == {"String": _METASPACE})


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        # Added tokens are plain text, which the decoder passes on as it is.
        return token.encode()


def _from_metaspace(token: str) -> bytes:
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace(_METASPACE, " ").encode()
