"""Text to token ids and back, with the model's special ids and generation defaults. Thread-safe, no state of requests.

Long texts take seconds: callers on the event loop run `encode` and the batch methods in a thread. Of the library only
the batch functions release the GIL, so a single text goes through them too; otherwise a thread would help nobody.
Never imports torch; transformers only for directories without a tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from frontend.generation_config import GenerationDefaults, read_defaults, read_eos_token_ids
from frontend.plain_texts import PlainTexts
from frontend.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids of a text, and for each the character range it came from (start, end) when that was asked for."""

    token_ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """A `tokenizers` tokenizer plus the facts of its model directory."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        defaults: GenerationDefaults | None = None,
    ) -> None:
        # Some models ship a truncation or padding meant for training; a prompt must arrive as it is.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_token_ids = eos_token_ids
        self.defaults = defaults or GenerationDefaults()
        vocab = backend.get_vocab(with_added_tokens=True)
        # Largest id with a text of its own; ids need not be contiguous.
        self.max_token_id = max(vocab.values(), default=-1)
        # No token stands for more bytes of text than this; an over-estimate for byte-level vocabularies.
        self.max_token_bytes = max((len(token.encode()) for token in vocab), default=1)
        added = backend.get_added_tokens_decoder()
        self._token_bytes = TokenBytes(backend)
        # What `decode` would add for a token that stands behind a whole character.
        self.plain_texts = PlainTexts(self._token_bytes, self.max_token_id)
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Load the tokenizer files of a model directory. Raises ValueError, saying which file is missing or wrong."""
        backend = _load_backend(directory)
        return cls(
            backend,
            eos_token_ids=read_eos_token_ids(directory, backend.token_to_id),
            defaults=read_defaults(directory),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        [encoding] = self.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.token_ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, has_offsets: bool = False
    ) -> list[Encoding]:
        """Encode several texts, on demand with offsets in characters, which cost more than the ids."""
        encode = self._backend.encode_batch if has_offsets else self._backend.encode_batch_fast
        encoded = encode(list(texts), add_special_tokens=add_special_tokens)
        return [Encoding(item.ids, item.offsets if has_offsets else []) for item in encoded]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids, valid UTF-8; an id without a token has no text. Raises OverflowError outside uint32.

        For the few ids of a step; holds the GIL.
        """
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_batch(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """Text of each id list, as `decode` gives it."""
        return self._backend.decode_batch(sequences, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly what the token stands for, which need not be text; empty for an id without a token."""
        return self._token_bytes.of(token_id)


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return _convert(directory)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    # The library raises plain Exception, whatever is wrong with the file.
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer file: {error}") from error


def _convert(directory: Path) -> tokenizers.Tokenizer:
    """Let transformers build the same kind of tokenizer from older files (tokenizer.model, vocab.json)."""
    try:
        # Imported only here: transformers costs a second, and torch with it wherever torch is installed.
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{directory} has no tokenizer.json; converting its other files needs the package transformers"
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(str(directory))
    except Exception as error:
        raise ValueError(f"{directory} has no tokenizer.json and cannot be converted: {error}") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(f"{directory} has no tokenizer.json and no tokenizer that converts to one")
    return backend
