"""The bytes of tokens, read from tokenizer.json, against what the tokenizer itself decodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from engine_core.structured_output.vocabulary import Vocabulary, VocabularyError, read_vocabulary
from fakes.small_tokenizer import byte_level_backend, metaspace_backend, write_model_dir

TEXTS = ["hello world", " the café", "STOP ing", "a\n\tb  c", "日本 😀"]


def read(directory: Path, backend: tokenizers.Tokenizer, vocab_size: int | None = None) -> Vocabulary:
    write_model_dir(directory, backend)
    return read_vocabulary(directory, vocab_size or backend.get_vocab_size())


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_add_up_to_the_text(tmp_path: Path, text: str) -> None:
    backend = byte_level_backend()
    vocabulary = read(tmp_path, backend)
    assert b"".join(vocabulary.tokens[i] for i in backend.encode(text).ids) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_metaspace_tokens_add_up_to_the_text_behind_the_space_that_decoding_drops(tmp_path: Path, text: str) -> None:
    backend = metaspace_backend()
    vocabulary = read(tmp_path, backend)
    assert b"".join(vocabulary.tokens[i] for i in backend.encode(text).ids) == b" " + text.encode()


def test_special_tokens_have_no_bytes_and_plain_added_tokens_have_theirs(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<tool é>"])
    vocabulary = read(tmp_path, backend)
    assert vocabulary.tokens[:2] == (b"", b"")
    assert vocabulary.tokens[backend.token_to_id("<tool é>")] == "<tool é>".encode()


def test_it_is_as_long_as_the_models_rows(tmp_path: Path) -> None:
    backend = byte_level_backend()
    assert read(tmp_path, backend, 100).tokens == read(tmp_path, backend, 400).tokens[:100]
    assert set(read(tmp_path, backend, 400).tokens[backend.get_vocab_size() :]) == {b""}


def test_equal_vocabularies_have_equal_hashes(tmp_path: Path) -> None:
    assert Vocabulary((b"a", b"bc")).sha256 == Vocabulary((b"a", b"bc")).sha256
    assert Vocabulary((b"a", b"bc")).sha256 != Vocabulary((b"ab", b"c")).sha256


def test_unigram_vocabularies_are_lists(tmp_path: Path) -> None:
    description = {
        "model": {"vocab": [["<unk>", 0.0], ["▁a", -1.0], ["<0xE9>", -2.0]]},
        "decoder": {"type": "Metaspace"},
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert read_vocabulary(tmp_path, 3).tokens == (b"", b" a", b"\xe9")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not understood"),
        ("[]", "not understood"),
        ("{}", "decoder"),
        ('{"decoder": {"type": "WordPiece"}, "model": {"vocab": {"a": 0}}}', "WordPiece"),
        ('{"decoder": null, "model": {"vocab": {"a": 0}}}', "missing"),
        ('{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {}}}', "no token"),
    ],
)
def test_files_that_are_not_understood_say_so(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(VocabularyError, match=words):
        read_vocabulary(tmp_path, 10)


def test_a_model_without_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="can not be read"):
        read_vocabulary(tmp_path, 10)
