"""The tokenizer of a model directory: ids, text, special tokens, and clear errors for missing or wrong files."""

from __future__ import annotations

import builtins

import pytest

from fakes.small_tokenizer import END, byte_level_backend, byte_level_tokenizer, write_model_dir
from frontend.tokenizer import Tokenizer


def test_text_round_trips() -> None:
    tokenizer = byte_level_tokenizer()
    text = " the café stopping 😀\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_known_and_skipped_on_demand() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode(f"hello{END}")
    assert ids[-1] == 0
    assert tokenizer.special_token_ids == {0, 1}
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"hello{END}"


def test_ids_without_a_token_have_no_text() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode([tokenizer.max_token_id + 1]) == ""


def test_batch_has_offsets_in_characters() -> None:
    [first, second] = byte_level_tokenizer().encode_batch(["hello world", ""])
    assert first.offsets == [(0, 5), (5, 11)]
    assert len(first.token_ids) == 2
    assert second.token_ids == []


def test_longest_token_bounds_every_token() -> None:
    tokenizer = byte_level_tokenizer()
    texts = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(tokenizer.vocab_size)]
    assert max(len(text.encode()) for text in texts if "\ufffd" not in text) <= tokenizer.max_token_bytes


def test_directory_brings_eos_ids_and_defaults(tmp_path) -> None:
    directory = write_model_dir(
        tmp_path,
        byte_level_backend(),
        config={"eos_token_id": 5},
        generation_config={"eos_token_id": [7, 5], "temperature": 0.6, "top_k": 20},
        tokenizer_config={"eos_token": {"content": END}},
    )
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.eos_token_ids == (0, 5, 7)
    assert tokenizer.defaults.temperature == 0.6
    assert tokenizer.defaults.top_k == 20
    assert tokenizer.defaults.top_p == 1.0


def test_directory_with_tokenizer_json_alone_is_enough(tmp_path) -> None:
    tokenizer = Tokenizer.from_directory(write_model_dir(tmp_path, byte_level_backend()))
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.defaults.temperature == 1.0


def test_shipped_truncation_and_padding_are_switched_off(tmp_path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    tokenizer = Tokenizer.from_directory(write_model_dir(tmp_path, backend))
    assert len(tokenizer.encode("abcdefg")) == 7


def test_broken_tokenizer_file_is_named(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer file"):
        Tokenizer.from_directory(tmp_path)


def test_missing_tokenizer_json_without_transformers_says_what_to_install(tmp_path, monkeypatch) -> None:
    real_import = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("transformers"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match="needs the package transformers"):
        Tokenizer.from_directory(tmp_path)
