"""The tokenizer of a model directory: ids, text, special tokens, and clear errors for missing or wrong files."""

from __future__ import annotations

import builtins
import threading

import pytest

from fakes.small_tokenizer import END, byte_level_backend, byte_level_tokenizer, write_model_dir
from frontend.detokenizer import Detokenizer
from frontend.tokenizer import Tokenizer


class _CountingBackend:
    """A library tokenizer that counts how often its vocabulary is copied."""

    def __init__(self) -> None:
        self._backend = byte_level_backend()
        self.num_scans = 0

    def get_vocab(self, **options):
        self.num_scans += 1
        return self._backend.get_vocab(**options)

    def __getattr__(self, name):
        return getattr(self._backend, name)


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


def test_batches_are_decoded_like_single_lists() -> None:
    tokenizer = byte_level_tokenizer()
    sequences = [tokenizer.encode(f"hello{END} 😀"), [], [tokenizer.max_token_id + 1, 5]]
    for skip in (True, False):
        singly = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in sequences]
        assert tokenizer.decode_batch(sequences, skip_special_tokens=skip) == singly


@pytest.mark.parametrize("what", ["encode", "decode_batch"])
def test_other_threads_run_while_a_long_text_is_worked_on(what) -> None:
    tokenizer = byte_level_tokenizer()
    text = " hello the world" * 100_000
    argument = text if what == "encode" else [tokenizer.encode(text)]
    # Of this thread, in each call: one or two at the ends if the GIL were held in between.
    turns, has_enough = [0], threading.Event()

    def work() -> None:
        # A call may be over before a busy machine lets this thread run.
        for _ in range(20):
            if not has_enough.is_set():
                turns.append(0)
                getattr(tokenizer, what)(argument)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        call = len(turns) - 1
        thread.join(0.0001)
        turns[call] += 1
        if turns[call] > 10:
            has_enough.set()
    assert max(turns[1:]) > 10


def test_batch_has_offsets_in_characters() -> None:
    [first, second] = byte_level_tokenizer().encode_batch(["hello world", ""], has_offsets=True)
    assert first.offsets == [(0, 5), (5, 11)]
    assert len(first.token_ids) == 2
    assert second.token_ids == []


def test_batch_has_no_offsets_unless_asked_for() -> None:
    tokenizer = byte_level_tokenizer()
    [encoding] = tokenizer.encode_batch(["hello world"])
    assert encoding.token_ids == tokenizer.encode("hello world")
    assert encoding.offsets == []


def test_vocabulary_is_scanned_while_loading_and_never_again() -> None:
    backend = _CountingBackend()
    tokenizer = Tokenizer(backend)  # type: ignore[arg-type]
    num_scans = backend.num_scans
    assert (tokenizer.max_token_id, tokenizer.max_token_bytes) == (292, 10)
    Detokenizer(tokenizer, []).step(5)
    assert backend.num_scans == num_scans


def test_longest_token_bounds_every_token() -> None:
    tokenizer = byte_level_tokenizer()
    texts = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(tokenizer.max_token_id + 1)]
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
