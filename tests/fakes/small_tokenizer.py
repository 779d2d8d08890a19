"""Small tokenizers made on the spot, of the two kinds that matter: byte-level BPE and SentencePiece-like BPE.

Their vocabularies are written out, so that ids never change with a version of the library.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from frontend.generation_config import GenerationDefaults
from frontend.tokenizer import Tokenizer

END, USER = "<|end|>", "<|user|>"
_WORDS = (" hello", " world", "hello", " the", " stop", "STOP", "ing", " café", " 😀")
_META_WORDS = ("▁hello", "▁world", "▁the", "ing")


def byte_level_backend() -> tokenizers.Tokenizer:
    """Ids 0 and 1 are special, 2..257 are the bytes, the rest are beginnings of words. Every text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = _vocabulary([END, USER, *alphabet], ["".join(_byte_characters(word.encode())) for word in _WORDS])
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, USER])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    """Spaces are part of the words, the first one is dropped in decoding, and rare characters fall back to bytes."""
    start = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz.,!"]
    vocab, merges = _vocabulary(start, list(_META_WORDS))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


def byte_level_tokenizer(defaults: GenerationDefaults | None = None) -> Tokenizer:
    return Tokenizer(byte_level_backend(), eos_token_ids=(0,), defaults=defaults)


def metaspace_tokenizer() -> Tokenizer:
    return Tokenizer(metaspace_backend(), eos_token_ids=(1,))


def write_model_dir(directory: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    """A model directory with tokenizer.json, and `name={...}` written as name.json."""
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def byte_ids(data: bytes) -> list[int]:
    """Byte-level ids: one token for each byte, also where they are no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(character) + 2 for character in _byte_characters(data)]


def _byte_characters(data: bytes) -> list[str]:
    """The printable stand-ins of byte-level BPE: printable Latin-1 bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in data]


def _vocabulary(start: list[str], words: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Ids for the start and for each beginning of each word, with the merges that lead there."""
    vocab = {token: index for index, token in enumerate(start)}
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(2, len(word) + 1):
            merges[(word[: end - 1], word[end - 1])] = None
            vocab.setdefault(word[:end], len(vocab))
    return vocab, list(merges)
