"""The incremental detokenizer: nothing twice, nothing lost, nothing of the prompt, always whole characters."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.small_tokenizer import END, byte_ids, byte_level_tokenizer, metaspace_tokenizer
from frontend.detokenizer import Detokenizer

BYTES = byte_level_tokenizer()
META = metaspace_tokenizer()
# Nothing can be told without decoding.
NO_PLAIN_TEXTS: dict[int, str] = defaultdict(str)


def decode_stepwise(tokenizer, prompt, output, **options) -> tuple[list[str], str]:
    """Piece of each token, and the flushed rest."""
    detokenizer = Detokenizer(tokenizer, prompt, **options)
    pieces = [detokenizer.step(token_id) for token_id in output]
    return pieces, detokenizer.flush()


def common_prefix(first: str, second: str) -> str:
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return first[:length]


def expected_output(tokenizer, prompt, output) -> str:
    """What a full decode of everything adds to a full decode of the prompt."""
    everything = tokenizer.decode([*prompt, *output])
    return everything.removeprefix(common_prefix(tokenizer.decode(prompt), everything))


any_ids = st.lists(st.integers(0, BYTES.max_token_id + 3), max_size=40)
# Raw bytes make broken and half characters much more likely than random ids do.
raw_bytes = st.binary(max_size=24).map(lambda data: byte_ids(data))
texts = st.text(alphabet="a é日😀\ufffd\n", max_size=24).map(lambda text: BYTES.encode(text))
streams = any_ids | raw_bytes | texts


@given(prompt=streams, output=streams)
def test_pieces_add_up_to_a_full_decode(prompt, output) -> None:
    pieces, rest = decode_stepwise(BYTES, prompt, output)
    assert "".join(pieces) + rest == expected_output(BYTES, prompt, output)


@given(text=st.text(max_size=60), cut=st.integers(0, 200))
def test_a_text_cut_anywhere_between_prompt_and_output_comes_out_whole(text, cut) -> None:
    ids = byte_ids(text.encode())
    cut = min(cut, len(ids))
    pieces, rest = decode_stepwise(BYTES, ids[:cut], ids[cut:])
    got = "".join(pieces) + rest
    assert text.endswith(got)
    # At most the character that the cut divides belongs to both sides.
    assert len(got.encode()) - len(ids[cut:]) in range(4)


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz.,! 日é😀", max_size=60), st.integers(0, 60))
def test_words_with_leading_spaces_and_characters_of_byte_tokens(text, cut) -> None:
    ids = META.encode(text)
    whole = META.decode(ids)
    pieces, rest = decode_stepwise(META, ids[:cut], ids[cut:])
    # Half a character spoils the whole run of bytes before it in a full decode, so compare from the last whole one.
    starts = (META.decode(ids[:end]) for end in range(min(cut, len(ids)), -1, -1))
    prompt = next(start for start in starts if whole.startswith(start))
    assert "".join(pieces) + rest == whole.removeprefix(prompt)


@pytest.mark.parametrize("num_hidden_bytes", range(4))
def test_long_prompt_of_byte_tokens_spoils_nothing(num_hidden_bytes) -> None:
    ids = META.encode("日" * 20 + "😀" * 20)
    cut = len(ids) - 40 - num_hidden_bytes
    pieces, rest = decode_stepwise(META, ids[:cut], ids[cut:])
    assert "".join(pieces) + rest == "😀" * (10 + (num_hidden_bytes > 0))


@given(streams)
def test_every_piece_is_valid_utf8(output) -> None:
    pieces, rest = decode_stepwise(BYTES, [], output)
    assert all(piece.encode().decode() == piece for piece in [*pieces, rest])


@pytest.mark.regression(14)
@pytest.mark.parametrize("num_prompt_bytes", [1, 2, 3])
def test_prompt_that_ends_inside_a_character_does_not_leak(num_prompt_bytes) -> None:
    prompt = byte_ids(b"secret prompt") + byte_ids("😀".encode()[:num_prompt_bytes])
    output = byte_ids("😀".encode()[num_prompt_bytes:]) + byte_ids(b" ok")
    pieces, rest = decode_stepwise(BYTES, prompt, output)
    assert "".join(pieces) + rest == "😀 ok"


def test_prompt_whose_last_character_is_never_finished_shows_nothing_of_it() -> None:
    prompt = byte_ids("secret 日".encode()[:-1])
    pieces, rest = decode_stepwise(BYTES, prompt, byte_ids(b"ok"))
    assert "".join(pieces) + rest == "ok"


def test_character_waits_for_its_last_byte() -> None:
    pieces, rest = decode_stepwise(BYTES, [], byte_ids("a😀b".encode()))
    assert pieces == ["a", "", "", "", "😀", "b"]
    assert rest == ""


def test_flush_shows_what_never_became_a_character() -> None:
    pieces, rest = decode_stepwise(BYTES, [], byte_ids(b"a\xf0\x9f"))
    assert pieces == ["a", "", ""]
    assert rest == "\ufffd"


def test_flush_without_output_is_empty_even_after_half_a_character() -> None:
    assert decode_stepwise(BYTES, byte_ids(b"a\xf0"), []) == ([], "")


def test_special_tokens_are_hidden_or_shown() -> None:
    output = BYTES.encode(f"hello{END} world")
    assert "".join(decode_stepwise(BYTES, [], output)[0]) == "hello world"
    shown, _ = decode_stepwise(BYTES, [], output, skip_special_tokens=False)
    assert "".join(shown) == f"hello{END} world"


def test_ids_without_a_token_have_no_text() -> None:
    pieces, rest = decode_stepwise(BYTES, [], [BYTES.max_token_id + 1, 2**32, -1])
    assert pieces == ["", "", ""]
    assert rest == ""


class _FailingOnce:
    """A tokenizer whose decoder fails on its next long window, or always on one id."""

    def __init__(self, *, poison: int | None = None) -> None:
        self.special_token_ids = BYTES.special_token_ids
        self.max_token_id = BYTES.max_token_id
        self.plain_texts = NO_PLAIN_TEXTS
        self.failures_left = 1
        self._poison = poison

    def decode(self, token_ids, *, skip_special_tokens=True) -> str:
        if self._poison in token_ids:
            raise RuntimeError("poisoned")
        if len(token_ids) > 3 and self.failures_left and self._poison is None:
            self.failures_left -= 1
            raise RuntimeError("decoder failed")
        return BYTES.decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_decoder_error_is_survived_once_without_losing_text() -> None:
    tokenizer = _FailingOnce()
    pieces, rest = decode_stepwise(tokenizer, [], byte_ids("abc日é!".encode()))
    assert "".join(pieces) + rest == "abc日é!"
    assert tokenizer.failures_left == 0


def test_a_token_that_cannot_be_decoded_at_all_is_an_error() -> None:
    detokenizer = Detokenizer(_FailingOnce(poison=65), [])
    with pytest.raises(RuntimeError, match="poisoned"):
        detokenizer.step(65)


class _CountingDecoder:
    """Counts how many ids are decoded."""

    def __init__(self) -> None:
        self.special_token_ids = BYTES.special_token_ids
        self.max_token_id = BYTES.max_token_id
        self.plain_texts = NO_PLAIN_TEXTS
        self.num_decoded = 0

    def decode(self, token_ids, *, skip_special_tokens=True) -> str:
        self.num_decoded += len(token_ids)
        return BYTES.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    "pattern",
    [b"a", b"\xff", "😀".encode(), b"\x82A\xe2", b"\xe2\x82"],
    ids=["ascii", "never valid", "four bytes", "every border inside", "never finished"],
)
def test_cost_of_a_token_does_not_grow_with_the_answer(pattern) -> None:
    counter = _CountingDecoder()
    detokenizer = Detokenizer(counter, [])
    ids = byte_ids(pattern * 1000)
    for token_id in ids[:500]:
        detokenizer.step(token_id)
    counter.num_decoded = 0
    for token_id in ids[500:1000]:
        detokenizer.step(token_id)
    early = counter.num_decoded
    for token_id in ids[-500:]:
        detokenizer.step(token_id)
    assert counter.num_decoded - early < early * 1.5
    assert early < 500 * 30


def test_tokens_without_text_do_not_pile_up() -> None:
    counter = _CountingDecoder()
    detokenizer = Detokenizer(counter, [])
    for _ in range(2000):
        detokenizer.step(BYTES.max_token_id + 1)
    assert counter.num_decoded == 0


@given(st.lists(st.integers(0, BYTES.max_token_id), max_size=40))
def test_tokens_that_need_no_decoding_bring_the_same_pieces(output) -> None:
    decoding = _CountingDecoder()
    assert decode_stepwise(BYTES, [], output) == decode_stepwise(decoding, [], output)


def test_a_token_of_whole_characters_is_not_decoded() -> None:
    class Counting(_CountingDecoder):
        def __init__(self) -> None:
            super().__init__()
            self.plain_texts = BYTES.plain_texts

    counter = Counting()
    pieces, _ = decode_stepwise(counter, [], BYTES.encode("hello the world"))
    assert "".join(pieces) == "hello the world"
    assert counter.num_decoded == 0


def test_a_plain_token_costs_microseconds() -> None:
    ids = BYTES.encode(" hello the world stop" * 500)
    detokenizer = Detokenizer(BYTES, [])
    start = time.process_time()
    for token_id in ids:
        detokenizer.step(token_id)
    # Ten times what it takes; only a change of the order of growth should fail this.
    assert (time.process_time() - start) / len(ids) < 50e-6
