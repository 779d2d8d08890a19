"""Bytes of single tokens, for each way in which vocabularies spell them."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from fakes.small_tokenizer import END, byte_ids, byte_level_backend, byte_level_tokenizer, metaspace_backend
from frontend.token_bytes import TokenBytes


def word_tokenizer(decoder: decoders.Decoder | None, *words: str) -> TokenBytes:
    backend = tokenizers.Tokenizer(models.WordLevel(vocab={word: place for place, word in enumerate(words)}))
    if decoder is not None:
        backend.decoder = decoder
    return TokenBytes(backend)


@given(st.text())
def test_byte_level_tokens_join_to_the_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_half_a_character_and_a_leading_space_are_exact() -> None:
    tokenizer = byte_level_tokenizer()
    halves = [tokenizer.token_bytes(token_id) for token_id in byte_ids("😀".encode())]
    assert halves == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert tokenizer.token_bytes(tokenizer.encode(" hello")[0]) == b" hello"


def test_special_tokens_are_their_own_text_and_other_ids_nothing() -> None:
    token_bytes = TokenBytes(byte_level_backend())
    assert token_bytes.of(0) == END.encode()
    assert token_bytes.of(999_999) == b""


def test_sentencepiece_like_tokens() -> None:
    backend = metaspace_backend()
    token_bytes = TokenBytes(backend)
    of = {token: token_bytes.of(token_id) for token, token_id in backend.get_vocab().items()}
    assert (of["▁hello"], of["ing"], of["<0xF0>"], of["</s>"]) == (b" hello", b"ing", b"\xf0", b"</s>")


@pytest.mark.parametrize(
    ("decoder", "token", "expected"),
    [
        (decoders.Metaspace(), "▁a", b" a"),
        (decoders.WordPiece(), "##ing", b"ing"),
        (decoders.BPEDecoder(), "low</w>", b"low "),
        (decoders.ByteLevel(), "日", "日".encode()),
        (None, "Ġa", "Ġa".encode()),
        (decoders.Fuse(), "<0x41>", b"<0x41>"),
        (decoders.Sequence([decoders.Sequence([decoders.ByteFallback()]), decoders.Fuse()]), "<0x41>", b"A"),
    ],
    ids=["metaspace", "wordpiece", "bpe", "no byte", "no decoder", "no byte tokens", "nested"],
)
def test_each_kind_of_vocabulary(decoder: decoders.Decoder | None, token: str, expected: bytes) -> None:
    assert word_tokenizer(decoder, token).of(0) == expected
