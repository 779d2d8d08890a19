"""OpenAI's shapes of log-probabilities: characters that several tokens make, and values that must not be mixed up."""

from __future__ import annotations

import pytest

from frontend.api.openai_http.logprobs import LEAST, ChatLogprobs, CompletionLogprobs
from stepwire.v1.common_pb2 import Logprob, TokenLogprobs

EURO = [b"\xe2", b"\x82", b"\xac"]


def row(sampled: bytes, *top: bytes, value: float = -5.0) -> TokenLogprobs:
    """The most likely ones have -1, -2 and so on."""
    return TokenLogprobs(
        sampled=Logprob(token_bytes=sampled, logprob=value),
        top=[Logprob(token_bytes=one, logprob=-1.0 - place) for place, one in enumerate(top)],
    )


def test_a_character_stands_at_the_token_that_completes_it():
    lists = CompletionLogprobs().of(map(row, [b"a", *EURO, b"b"]))
    assert lists["tokens"] == ["a", "", "", "€", "b"]
    assert lists["text_offset"] == [0, 1, 1, 1, 2]


def test_a_character_may_go_on_in_the_next_part_of_a_stream():
    choice, other = CompletionLogprobs(), CompletionLogprobs()
    parts = [choice.of([row(one)]) for one in (b"x\xe2\x82", b"\xac!")]
    assert [part["tokens"] for part in parts] == [["x"], ["€!"]]
    assert [part["text_offset"] for part in parts] == [[0], [1]]
    assert other.of([row(b"\xac")])["tokens"] == [""]


def test_a_character_may_go_on_behind_the_first_token_of_an_echo():
    lists = CompletionLogprobs().of([TokenLogprobs(), row(EURO[1]), row(EURO[2])], first_token=EURO[0])
    assert (lists["tokens"], lists["text_offset"]) == (["", "", "€"], [0, 0, 0])
    assert (lists["token_logprobs"][0], lists["top_logprobs"][0]) == (None, None)


def test_other_tokens_are_read_in_the_place_of_the_sampled_one():
    lists = CompletionLogprobs().of([row(b"\xe2\x82"), row(b"\xac", b"\xad", b"a", b"\xff")])
    assert lists["tokens"] == ["", "€"]
    assert lists["top_logprobs"][1] == {"\u20ad": -1.0, "a": -2.0, "": -3.0, "€": -5.0}


def test_of_several_tokens_with_one_text_the_sampled_one_keeps_its_value():
    [top] = CompletionLogprobs().of([row(b"\xe2", b"\xe3", b"\xe4", b"a")])["top_logprobs"]
    assert top == {"": -5.0, "a": -3.0}


def test_bytes_that_never_became_a_character_count_as_the_text_shows_them():
    lists = CompletionLogprobs().of(map(row, [b"\xe2", b"a", b"\xff", b"b"]))
    assert (lists["tokens"], lists["text_offset"]) == (["", "a", "", "b"], [0, 0, 2, 3])


def test_tokens_of_chats_are_read_alike_and_their_bytes_are_exact():
    choice = ChatLogprobs()
    content = [entry for one in EURO for entry in choice.of([row(one, b"\xac", b"z")])["content"]]
    assert [entry["token"] for entry in content] == ["", "", "€"]
    assert [entry["bytes"] for entry in content] == [list(one) for one in EURO]
    assert [entry["top_logprobs"][0]["token"] for entry in content] == ["", "", "€"]
    assert all(entry["top_logprobs"][1]["token"] == "z" for entry in content)


@pytest.mark.parametrize("value", [float("-inf"), LEAST])
def test_minus_infinity_is_a_number(value: float):
    [entry] = ChatLogprobs().of([row(b"a", value=value)])["content"]
    assert entry["logprob"] == LEAST
