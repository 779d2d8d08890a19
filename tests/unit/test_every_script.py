"""Streamed text in every script: equal to the whole decode wherever a stream is cut, and stopped where a search stops.

500 texts and as many with broken bytes, through the embedded model's tokenizer (byte-level) and through one that marks
words and falls back to bytes. Expected values come from decoding and searching everything at once.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes.script_texts import SCRIPTS, break_bytes, script_text
from fakes.small_tokenizer import metaspace_tokenizer
from fakes.text_requests import finish, make_request, tokens
from frontend.choice_state import ChoiceState
from frontend.detokenizer import Detokenizer
from frontend.engine_outputs import EngineFinishReason
from frontend.tokenizer import Tokenizer

NUM_TEXTS = 500
BROKEN = "\ufffd"
REQUEST = make_request(prompt_token_ids=[])


@dataclass(frozen=True)
class Streams:
    """A tokenizer, and the token lists of all texts."""

    tokenizer: Tokenizer
    whole: list[list[int]]
    broken: list[list[int]]

    def __iter__(self) -> Iterator[list[int]]:
        yield from self.whole
        yield from self.broken


def streams_of(tokenizer: Tokenizer, num_words: int, break_ids: Callable[[int, list[int]], list[int]]) -> Streams:
    whole = [tokenizer.encode(script_text(seed, num_words)) for seed in range(NUM_TEXTS)]
    return Streams(tokenizer, whole, [break_ids(seed, token_ids) for seed, token_ids in enumerate(whole)])


@pytest.fixture(scope="module")
def real(embedded_model_dir: Path) -> Streams:
    tokenizer = Tokenizer.from_directory(embedded_model_dir)
    known = map(tokenizer.token_bytes, range(tokenizer.max_token_id + 1))
    loose_ids = [token_id for token_id, data in enumerate(known) if len(data) == 1 and data[0] >= 0x80]
    assert len(loose_ids) > 100
    return streams_of(tokenizer, 3, lambda seed, token_ids: break_bytes(seed, token_ids, loose_ids))


@pytest.fixture(scope="module")
def marked() -> Streams:
    tokenizer = metaspace_tokenizer()
    return streams_of(tokenizer, 1, lambda seed, token_ids: _break_between_words(tokenizer, seed, token_ids))


def _break_between_words(tokenizer: Tokenizer, seed: int, token_ids: list[int]) -> list[int]:
    """Lone bytes between words: characters right beside one are spoiled by a whole decode, but not in a stream."""
    rng = random.Random(seed)
    word, *lone = tokenizer.encode("hello"), *(tokenizer.encode("é")[-2:])
    broken = [*token_ids, *word]
    for _ in range(rng.randint(1, 4)):
        broken += [rng.choice(lone)] * rng.randint(1, 3) + word
    return broken


def stream_pieces(choice: ChoiceState, token_ids: list[int]) -> Iterator[str]:
    """Token by token, as the output processor takes them."""
    for token_id in token_ids:
        yield choice.take_plain(token_id) or choice.process(tokens(1, token_id)).text


def copy_of(choice: ChoiceState) -> ChoiceState:
    other = copy.copy(choice)
    other._held, other._detokenizer = copy.copy(choice._held), choice._detokenizer.copy()
    for name in ("_groups", "_open_ids"):
        setattr(other._held, name, copy.copy(getattr(choice._held, name)))
    return other


def text_of_slice(choice: ChoiceState, token_ids: list[int]) -> str:
    """All of it in one output, which is the last."""
    return choice.process(finish(1, EngineFinishReason.LENGTH, *token_ids)).text


def assert_cuts_change_nothing(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    whole = tokenizer.decode(token_ids)
    choice, sent = ChoiceState(REQUEST, 0, tokenizer), ""
    for cut, piece in enumerate(stream_pieces(choice, token_ids), 1):
        sent += piece
        assert sent + text_of_slice(copy_of(choice), token_ids[cut:]) == whole, (cut, token_ids)
        ended = tokenizer.decode(token_ids[:cut])
        if spells_bytes(tokenizer) or not ended.endswith(BROKEN):
            assert sent + text_of_slice(copy_of(choice), []) == ended, (cut, token_ids)


def spells_bytes(tokenizer: Tokenizer) -> bool:
    """Otherwise half a character spoils what a whole decode makes of the characters beside it."""
    return tokenizer.decode(tokenizer.encode("日本")[:-1]).startswith("日")


@pytest.mark.slow
def test_the_texts_are_what_they_are_meant_to_be(real: Streams) -> None:
    assert len(SCRIPTS) >= 12
    assert all(real.tokenizer.decode(token_ids) == script_text(seed, 3) for seed, token_ids in enumerate(real.whole))
    assert sum(BROKEN in real.tokenizer.decode(token_ids) for token_ids in real.broken) > NUM_TEXTS * 0.9


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.slow), "marked"])
def streams(request: pytest.FixtureRequest) -> Streams:
    found: Streams = request.getfixturevalue(request.param)
    return found


def test_an_answer_cut_into_slices_or_ended_anywhere_is_the_whole_decode(streams: Streams) -> None:
    for token_ids in streams:
        assert_cuts_change_nothing(streams.tokenizer, token_ids)


def test_output_begins_where_the_whole_characters_of_the_prompt_end(streams: Streams) -> None:
    tokenizer, rng = streams.tokenizer, random.Random(1)
    for token_ids in streams.whole:
        cut = rng.randint(0, len(token_ids))
        detokenizer = Detokenizer(tokenizer, token_ids[:cut])
        output = "".join(map(detokenizer.step, token_ids[cut:])) + detokenizer.flush()
        whole, prompt = tokenizer.decode(token_ids), tokenizer.decode(token_ids[:cut]).rstrip(BROKEN)
        assert whole.endswith(output)
        if spells_bytes(tokenizer):
            assert whole.removesuffix(output) == prompt


@dataclass(frozen=True)
class StoppedAnswer:
    """What came of a stream of tokens and stop strings."""

    text: str
    token_ids: list[int]
    stop: str | None


def run_stops(choice: ChoiceState, slices: list[list[int]]) -> StoppedAnswer:
    text, token_ids = "", []
    for index, part in enumerate(slices, 1):
        is_last = index == len(slices)
        news = choice.process(finish(1, EngineFinishReason.LENGTH, *part) if is_last else tokens(1, *part))
        text += news.text
        token_ids += news.token_ids
        if news.reason is not None:
            return StoppedAnswer(text, token_ids, news.stop_match.stop_string if news.stop_match else None)
    raise AssertionError("an answer without an end")


def draw_stops(rng: random.Random, whole: str, num_stops: int) -> list[str]:
    """Parts of the text, and now and then something that is not in it."""
    stops = []
    for _ in range(num_stops):
        start = rng.randrange(len(whole))
        stop = whole[start : start + rng.randint(1, 6)]
        stops.append(stop + ("@@" if rng.random() < 0.2 else ""))
    return stops


def draw_slices(rng: random.Random, token_ids: list[int]) -> list[list[int]]:
    slices, rest = [], token_ids
    while rest:
        size = rng.choice((1, 1, 1, 2, 3, len(rest)))
        slices.append(rest[:size])
        rest = rest[size:]
    return slices


def search(tokenizer: Tokenizer, token_ids: list[int], stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """Text kept and the stop: of those that the fewest tokens complete, the one that is listed first."""
    whole = tokenizer.decode(token_ids)
    for end in range(1, len(token_ids) + 1):
        known = whole if end == len(token_ids) else _known_text(tokenizer.decode(token_ids[:end]), whole)
        for stop in stops:
            found = known.find(stop)
            if found >= 0:
                return known[: found + len(stop) * include_stop], stop
    return whole, None


def _known_text(ended: str, whole: str) -> str:
    return ended if whole.startswith(ended) else ended.rstrip(BROKEN)


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_end_an_answer_where_a_search_of_its_text_does(streams: Streams, include_stop: bool) -> None:
    tokenizer, num_found = streams.tokenizer, 0
    for seed, token_ids in enumerate(streams):
        rng, whole = random.Random(seed), tokenizer.decode(token_ids)
        # Which token settles that a byte is broken is up to the decoder: one stop is found all the same.
        stops = draw_stops(rng, whole, 1 if BROKEN in whole else rng.randint(1, 4))
        changes = {"stop_strings": tuple(stops), "include_stop": include_stop, "prompt_token_ids": []}
        choice = ChoiceState(make_request(**changes), 0, tokenizer)
        answer = run_stops(choice, draw_slices(rng, token_ids))
        assert (answer.text, answer.stop) == search(tokenizer, token_ids, stops, include_stop), (seed, stops)
        assert answer.token_ids == token_ids[: len(answer.token_ids)]
        assert tokenizer.decode(answer.token_ids).startswith(answer.text.rstrip(BROKEN))
        num_found += answer.stop is not None
    assert num_found > len(streams.whole)
