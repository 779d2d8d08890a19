"""One choice: stop tokens, stop strings, min_tokens, echo, resumed output, and how ids and text travel together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.fake_logprobs import fake_rows
from fakes.small_tokenizer import END, byte_ids, byte_level_tokenizer
from fakes.text_requests import finish, make_request, tokens
from frontend.choice_state import ChoiceState
from frontend.engine_outputs import EngineFinishReason, EngineOutput
from frontend.generation_events import FinishReason, StopMatch
from frontend.output_parsers.reasoning import ReasoningParser

TOKENIZER = byte_level_tokenizer()
STOP, LENGTH = EngineFinishReason.STOP, EngineFinishReason.LENGTH


def ids(text: str | bytes) -> list[int]:
    """One token a byte."""
    return byte_ids(text.encode() if isinstance(text, str) else text)


def choice_of(**changes) -> ChoiceState:
    return ChoiceState(make_request(**changes), 0, TOKENIZER)


def run(choice: ChoiceState, outputs: list[EngineOutput]):
    """Feed outputs until the choice ends; returns (text, ids, last news)."""
    text, token_ids, news = "", [], None
    for output in outputs:
        news = choice.process(output)
        text += news.text
        token_ids += news.token_ids
        if news.reason is not None:
            break
    return text, token_ids, news


@pytest.mark.parametrize("reason", [LENGTH, EngineFinishReason.REPETITION, EngineFinishReason.ABORTED])
def test_ends_without_stop_token_show_every_token(reason) -> None:
    text, token_ids, news = run(choice_of(), [tokens(1, *ids("ab")), finish(1, reason, *ids("c"))])
    assert (text, token_ids) == ("abc", ids("abc"))
    assert news.stop_match is None
    expected = {LENGTH: FinishReason.LENGTH, EngineFinishReason.REPETITION: FinishReason.REPETITION}
    assert news.reason is expected.get(reason, FinishReason.CANCELLED)


# --- stop tokens (also those that are no special tokens) ---
@pytest.mark.regression(16)
@pytest.mark.parametrize("stop_id", [0, 70], ids=["special", "plain"])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_stop_token_leaves_no_text_and_no_id(stop_id, skip_special_tokens) -> None:
    choice = choice_of(output={"skip_special_tokens": skip_special_tokens})
    text, token_ids, news = run(choice, [tokens(1, *ids("ab")), finish(1, STOP, stop_id, stop_token_id=stop_id)])
    assert (text, token_ids) == ("ab", ids("ab"))
    assert news.stop_match == StopMatch(stop_token_id=stop_id)
    assert choice.num_output_tokens == 3


def test_stop_token_is_kept_on_demand() -> None:
    choice = choice_of(include_stop=True, output={"skip_special_tokens": False})
    text, token_ids, _ = run(choice, [tokens(1, *ids("a")), finish(1, STOP, 0)])
    assert (text, token_ids) == (f"a{END}", [*ids("a"), 0])


def test_end_of_sequence_is_named() -> None:
    _, _, news = run(choice_of(), [finish(1, STOP, *ids("a"), 0)])
    assert news.stop_match == StopMatch(eos_token_id=0)


@pytest.mark.parametrize(("eos_token_ids", "last"), [((), "}"), ((0,), "}"), ((0,), END)])
def test_the_end_of_a_grammar_is_shown_and_only_an_end_of_sequence_is_hidden(eos_token_ids, last) -> None:
    last_ids = [0] if last == END else ids(last)
    outputs = [tokens(1, *ids("{1")), finish(1, STOP, *last_ids)]
    choice = choice_of(eos_token_ids=eos_token_ids)
    text, token_ids, news = run(choice, outputs)
    assert (text, token_ids) == (("{1", ids("{1")) if last == END else ("{1}", ids("{1}")))
    assert news.stop_match == (StopMatch(eos_token_id=0) if last == END else None)
    assert choice.num_output_tokens == 3


def test_end_inside_a_character_is_flushed() -> None:
    text, token_ids, _ = run(choice_of(), [finish(1, LENGTH, *ids(b"a\xf0\x9f"))])
    assert (text, token_ids) == ("a\ufffd", ids(b"a\xf0\x9f"))


# --- stop strings ---
@pytest.mark.regression(17)
def test_stop_string_over_several_outputs() -> None:
    choice = choice_of(stop_strings=("STOP",))
    text, token_ids, news = run(choice, [tokens(1, token_id) for token_id in ids("one STOP two")])
    assert (text, token_ids) == ("one ", ids("one "))
    assert (news.reason, news.stop_match) == (FinishReason.STOP, StopMatch(stop_string="STOP"))
    assert choice.num_output_tokens == len("one STOP")


def test_tokens_after_a_stop_string_are_neither_shown_nor_billed() -> None:
    choice = choice_of(stop_strings=("STOP",))
    news = choice.process(finish(1, LENGTH, *ids("one STOP two")))
    assert (news.text, news.num_billed) == ("one ", len("one STOP"))
    assert news.stop_match == StopMatch(stop_string="STOP")


def test_held_back_text_comes_with_the_end() -> None:
    choice = choice_of(stop_strings=("STOP",))
    first = choice.process(tokens(1, *ids("xyST")))
    assert (first.text, first.token_ids) == ("x", ids("x"))
    last = choice.process(finish(1, LENGTH, *ids("!")))
    assert (last.text, last.token_ids) == ("yST!", ids("yST!"))


byte_texts = st.text(alphabet="aé😀S", max_size=12)


@given(byte_texts, st.lists(st.text(alphabet="aé😀S", min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_stop_string_does_not_depend_on_how_outputs_are_cut(text, stops, data) -> None:
    token_ids = ids(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    borders = [0, *cuts, len(token_ids)]
    outputs = [tokens(1, *token_ids[a:b]) for a, b in itertools.pairwise(borders)]
    got, got_ids, news = run(choice_of(stop_strings=tuple(stops)), [*outputs, finish(1, LENGTH)])
    # Byte tokens complete one character at a time, so the earliest end wins, then the first listed.
    ends = [(text.find(stop) + len(stop), index, stop) for index, stop in enumerate(stops) if stop in text]
    if not ends:
        assert (got, news.reason) == (text, FinishReason.LENGTH)
        assert got_ids == token_ids
    else:
        end, _, stop = min(ends)
        assert (got, news.stop_match) == (text[: end - len(stop)], StopMatch(stop_string=stop))
        assert TOKENIZER.decode(got_ids) == got


@pytest.mark.regression(17)
@given(byte_texts, st.booleans())
def test_ids_and_text_of_every_delta_agree(text, has_stop) -> None:
    choice = choice_of(stop_strings=("SSSS",) if has_stop else ())
    for token_id in ids(text):
        news = choice.process(tokens(1, token_id))
        if news.reason is None:
            assert TOKENIZER.decode(news.token_ids) == news.text
            assert news.num_tokens == len(news.token_ids)


# --- stop strings beside reasoning ---
def thinking_choice(*, is_open: bool = False, **changes) -> ChoiceState:
    return ChoiceState(make_request(**changes), 0, TOKENIZER, reasoning=ReasoningParser(None, is_open=is_open))


@pytest.mark.regression(17)
@pytest.mark.parametrize(
    ("is_open", "text", "shown"),
    [
        (False, "<think>a STOP b</think>\n\nc STOP d", "<think>a STOP b</think>\n\nc "),
        (False, " \n<think>STOP</think>c", None),
        (True, "a STOP b</think>c STOP", "a STOP b</think>c "),
        (True, "never over STOP", None),
        # Half in the reasoning, half behind it.
        (True, "ST</think>OP", None),
        # There is no reasoning where the answer begins with something else.
        (False, "<thin STOP <think>b", "<thin "),
        (False, "STOP", ""),
    ],
)
def test_stop_strings_count_in_content_only(is_open, text, shown) -> None:
    for size in (1, 3, 100):
        choice = thinking_choice(is_open=is_open, stop_strings=("STOP",))
        pieces = [ids(text[start : start + size]) for start in range(0, len(text), size)]
        got, got_ids, news = run(choice, [*(tokens(1, *piece) for piece in pieces), finish(1, LENGTH)])
        assert got == TOKENIZER.decode(got_ids) == (text if shown is None else shown)
        assert news.stop_match == (None if shown is None else StopMatch(stop_string="STOP"))


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        # A beginning that may become the mark is kept back, and found when it turns out to be content.
        ("<t", "<tx", ""),
        ("\n", " \nx", " "),
        ("<t", "<t", ""),
        # White space behind the reasoning is no content.
        ("\n", "<think>a\nb</think>\n\nc\nd", "<think>a\nb</think>\n\nc"),
    ],
)
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_that_look_like_a_border_of_the_reasoning(stop, text, shown, include_stop) -> None:
    choice = thinking_choice(stop_strings=(stop,), include_stop=include_stop)
    got, _, news = run(choice, [*(tokens(1, token_id) for token_id in ids(text)), finish(1, LENGTH)])
    assert got == shown + stop * include_stop
    assert news.stop_match == StopMatch(stop_string=stop)


def test_a_beginning_that_is_reasoning_is_no_match_even_if_it_looked_like_content() -> None:
    choice = thinking_choice(stop_strings=("<t", "\n"))
    text, _, news = run(choice, [*(tokens(1, token_id) for token_id in ids("\n<think>a")), finish(1, LENGTH)])
    assert (text, news.stop_match) == ("\n<think>a", None)


def test_no_stop_string_in_content_of_the_first_min_tokens() -> None:
    choice = thinking_choice(stop_strings=(" <",), min_tokens=1)
    text, _, news = run(choice, [*(tokens(1, token_id) for token_id in ids(" <a <b")), finish(1, LENGTH)])
    assert (text, news.stop_match) == (" <a", StopMatch(stop_string=" <"))


# The third is longer than what is replayed token by token.
@pytest.mark.parametrize(
    "text",
    ["<think>a STOP b</think> c STOP d", "STOP", "<think>" + "a STOP " * 30 + "</think>" + "b" * 90 + " STOP"],
)
def test_a_stream_resumed_anywhere_knows_whether_it_is_in_its_reasoning(text) -> None:
    token_ids = ids(text)
    expected, _, expected_end = run(thinking_choice(stop_strings=("STOP",)), [tokens(1, t) for t in token_ids])
    assert expected_end.stop_match == StopMatch(stop_string="STOP")
    for num_resumed in range(0, len(expected) - 3, 7):
        resumed = thinking_choice(stop_strings=("STOP",), resume_output_token_ids=token_ids[:num_resumed])
        got, _, end = run(resumed, [tokens(1, t) for t in token_ids[num_resumed:]])
        assert text[:num_resumed] + got == expected
        assert end.stop_match == expected_end.stop_match


# --- log-probabilities ---
def with_rows(output: EngineOutput, first_position: int) -> EngineOutput:
    return output._replace(logprobs=fake_rows(output.new_token_ids, first_position, 1))


@given(byte_texts, st.lists(st.text(alphabet="aé😀S", min_size=1, max_size=3), max_size=2), st.data())
def test_rows_ids_and_text_of_every_delta_agree(text, stops, data) -> None:
    """Whatever is held back, cut or hidden: the rows of a delta are those of its ids."""
    token_ids = ids(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=6)))
    has_ids, has_text = data.draw(st.booleans()), data.draw(st.booleans()) or bool(stops)
    options = {"token_ids": True, "text": has_text, "num_logprobs": 1}
    choice = choice_of(stop_strings=tuple(stops), output=options)
    twin = choice_of(stop_strings=tuple(stops), output={**options, "token_ids": has_ids})
    end = data.draw(st.sampled_from([finish(1, LENGTH), finish(1, STOP, 0)]))
    borders = [0, *cuts, len(token_ids)]
    outputs = [tokens(1, *token_ids[a:b]) for a, b in itertools.pairwise(borders)]
    position, given = 0, 0
    for output in (*outputs, end):
        output = with_rows(output, position)
        position += len(output.new_token_ids)
        news = choice.process(output)
        assert twin.process(output).logprobs == news.logprobs
        assert news.logprobs == (fake_rows(news.token_ids, given, 1) if news.token_ids else None)
        given += len(news.token_ids)
        if news.reason is not None:
            break
    assert news.reason is not None


def test_rows_are_not_looked_for_unless_asked() -> None:
    assert choice_of().process(tokens(1, *ids("ab"))).logprobs is None


def test_a_kept_stop_token_keeps_its_row() -> None:
    choice = choice_of(include_stop=True, output={"logprob_token_ids": (7,)})
    rows = fake_rows([*ids("a"), 0], 0, 0, (7,))
    assert choice.process(finish(1, STOP, *ids("a"), 0)._replace(logprobs=rows)).logprobs == rows


def test_echoed_prompt_ids_have_no_rows() -> None:
    choice = choice_of(prompt_token_ids=ids("hi "), prompt_text="hi ", output={"num_logprobs": 1})
    news = choice.process(with_rows(tokens(1, *ids("you")), 3))
    assert news.token_ids == ids("hi you")
    assert news.logprobs == fake_rows(ids("you"), 3, 1)


def test_tokens_without_the_rows_that_were_asked_for_are_an_error() -> None:
    with pytest.raises(ValueError, match="without log-probabilities"):
        choice_of(output={"num_logprobs": 0}).process(tokens(1, *ids("a")))


# --- min_tokens ---
@pytest.mark.regression(15)
def test_no_stop_string_inside_the_first_min_tokens() -> None:
    choice = choice_of(stop_strings=("b",), min_tokens=4)
    text, _, news = run(choice, [tokens(1, token_id) for token_id in ids("abababab")])
    assert text == "ababa"
    assert news.stop_match == StopMatch(stop_string="b")
    assert choice.num_output_tokens == 6


@pytest.mark.regression(15)
def test_text_from_before_the_limit_is_not_searched_later() -> None:
    choice = choice_of(stop_strings=("STOP",), min_tokens=2)
    text, _, news = run(choice, [*(tokens(1, token_id) for token_id in ids("STOP")), finish(1, LENGTH)])
    assert (text, news.reason) == ("STOP", FinishReason.LENGTH)


# --- what is shown ---
def test_ids_are_left_out_unless_asked_for_but_counted() -> None:
    news = choice_of(output={"token_ids": False}).process(tokens(1, *ids("ab")))
    assert (news.text, news.token_ids, news.num_tokens) == ("ab", [], 2)


def test_ids_alone_need_no_text() -> None:
    choice = choice_of(output={"text": False})
    news = choice.process(finish(1, STOP, *ids(b"a\xf0"), 0))
    assert (news.text, news.token_ids) == ("", ids(b"a\xf0"))
    assert choice.num_output_tokens == 3


def test_echo_opens_the_first_delta_and_is_not_counted() -> None:
    choice = choice_of(prompt_token_ids=ids("hi "), prompt_text="hi ")
    first = choice.process(tokens(1, *ids("you")))
    assert (first.text, first.token_ids, first.num_tokens) == ("hi you", ids("hi you"), 3)
    second = choice.process(tokens(1, *ids("!")))
    assert (second.text, second.token_ids) == ("!", ids("!"))


def test_echo_comes_even_without_output() -> None:
    choice = choice_of(prompt_token_ids=ids("hi "), prompt_text="hi ", output={"token_ids": False})
    news = choice.process(finish(1, STOP, 0))
    assert (news.text, news.token_ids) == ("hi ", [])


@pytest.mark.regression(14)
def test_prompt_cut_inside_a_character_does_not_leak() -> None:
    choice = choice_of(prompt_token_ids=ids("secret 😀".encode()[:-2]))
    text, _, _ = run(choice, [finish(1, LENGTH, *ids("😀 ok".encode()[2:]))])
    assert text == "😀 ok"


# --- resumed output ---
@given(st.text(alphabet="aé😀ST ", max_size=20), st.integers(0, 80))
def test_a_resumed_stream_goes_on_as_if_never_broken(text, num_resumed) -> None:
    token_ids = ids(text)
    delivered: list[int] = []
    options = {"stop_strings": ("ST",), "min_tokens": 3}
    whole = choice_of(**options)
    delivered_text = ""
    for token_id in token_ids:
        news = whole.process(tokens(1, token_id))
        if news.reason is not None or len(delivered) >= num_resumed:
            break
        delivered += news.token_ids
        delivered_text += news.text
    expected, _, expected_end = run(choice_of(**options), [tokens(1, t) for t in token_ids] + [finish(1, LENGTH)])
    resumed = choice_of(**options, resume_output_token_ids=delivered)
    rest = [tokens(1, token_id) for token_id in token_ids[len(delivered) :]]
    got, _, got_end = run(resumed, [*rest, finish(1, LENGTH)])
    assert delivered_text + got == expected
    assert got_end.stop_match == expected_end.stop_match


def test_resumed_tokens_are_not_billed_again() -> None:
    choice = choice_of(resume_output_token_ids=ids("abc"))
    news = choice.process(finish(1, LENGTH, *ids("d")))
    assert (news.text, news.num_billed, choice.num_output_tokens) == ("d", 1, 1)


def test_long_resumed_output_is_replayed_from_its_end_only(monkeypatch) -> None:
    calls = []
    real = TOKENIZER.decode
    monkeypatch.setattr(TOKENIZER, "decode", lambda *args, **options: calls.append(1) or real(*args, **options))
    choice_of(resume_output_token_ids=ids("a") * 10_000, stop_strings=("STOP",))
    assert len(calls) < 500


def test_a_resumed_stream_has_had_its_echo() -> None:
    choice = choice_of(prompt_text="hi ", resume_output_token_ids=ids("a"))
    assert choice.process(tokens(1, *ids("b"))).text == "b"
