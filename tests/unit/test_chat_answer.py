"""One choice of a chat: deltas told apart by a parser, held back text, the end, and streams that are resumed."""

from __future__ import annotations

import pytest

from fakes.fake_output_parser import FakeOutputParser
from frontend.chat.answer import ChoiceAnswer
from frontend.chat.events import ChatDelta, ChatFinished, ChatFinishReason
from frontend.generation_events import ChoiceDelta, ChoiceFinished, FinishReason, StopMatch
from frontend.output_parsers.interface import ToolCallDelta
from frontend.output_parsers.reasoning import ReasoningParser


def delta(text: str, *token_ids: int, num_tokens: int = 1) -> ChoiceDelta:
    return ChoiceDelta(0, text, token_ids, num_tokens)


def end(reason: FinishReason = FinishReason.STOP) -> ChoiceFinished:
    return ChoiceFinished(0, reason, StopMatch(stop_string="x"), 3)


def make(*, is_parallel: bool = True) -> ChoiceAnswer:
    return ChoiceAnswer(0, FakeOutputParser(), is_parallel=is_parallel)


def test_without_a_parser_all_text_is_content():
    answer = ChoiceAnswer(2, None, is_parallel=True)
    assert answer.take(ChoiceDelta(2, "~a@b", (7,), 1)) == ChatDelta(2, "~a@b", "", (), (7,), 1)
    assert answer.finish(end()) == [ChatFinished(2, ChatFinishReason.STOP, StopMatch(stop_string="x"))]


def test_text_is_told_apart():
    taken = make().take(delta("a~r~b@f:12;c", num_tokens=5))
    assert taken is not None
    assert (taken.content, taken.reasoning, taken.num_tokens) == ("abc", "r", 5)
    calls = (ToolCallDelta(0, "id0", "f", ""), ToolCallDelta(0, "", "", "1"), ToolCallDelta(0, "", "", "2"))
    assert taken.tool_calls == calls


def test_tokens_of_reasoning_are_counted():
    answer = make()
    for text, num_tokens in (("~ab", 2), ("c~", 1), ("d", 4)):
        answer.take(delta(text, num_tokens=num_tokens))
    assert answer.num_reasoning_tokens == 3


@pytest.mark.parametrize(
    ("is_open", "text", "expected"),
    [
        (False, "<think>ab \n\n cd \n</think>\n\nhello", len("<think>ab \n\n cd \n</think>")),
        (True, "ab</think>hello", len("ab</think>")),
        (True, "never \n over", len("never \n over")),
        (False, " \n<thin content", 0),
        (False, "<th", 0),
        # Undecided, and then reasoning.
        (False, " \n<think>ab", len(" \n<think>ab")),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_reasoning_counts_the_same_however_its_deltas_are_merged(is_open, text, expected, size):
    answer = ChoiceAnswer(0, ReasoningParser(None, is_open=is_open), is_parallel=True)
    # A token a character.
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        answer.take(delta(piece, num_tokens=len(piece)))
    answer.finish(end())
    assert answer.num_reasoning_tokens == expected


def test_tokens_without_text_count_with_those_that_follow():
    answer = ChoiceAnswer(0, ReasoningParser(None, is_open=True), is_parallel=True)
    for text, num_tokens in (("", 2), ("a", 1), ("</think>", 1), ("", 3), ("b", 1)):
        answer.take(delta(text, num_tokens=num_tokens))
    assert answer.num_reasoning_tokens == 4


@pytest.mark.parametrize("cut", range(1, 20))
def test_reasoning_that_was_resumed_is_not_counted_again(cut: int):
    text = "<think>abc</think>d"
    answer = ChoiceAnswer(0, ReasoningParser(None, is_open=False), is_parallel=True)
    answer.skip(text[:cut])
    answer.take(delta(text[cut:], num_tokens=len(text) - cut))
    assert answer.num_reasoning_tokens == max(0, len("<think>abc</think>") - cut)


def test_tokens_whose_text_is_held_back_are_counted_with_the_next():
    answer = make()
    assert answer.take(delta("@na", num_tokens=2)) is None
    taken = answer.take(delta("me:", num_tokens=1))
    assert taken is not None
    assert taken.num_tokens == 3


def test_token_ids_do_not_wait_for_their_text():
    taken = make().take(delta("@na", 5, 6))
    assert taken == ChatDelta(0, "", "", (), (5, 6), 1)


def test_what_is_held_back_comes_out_at_the_end():
    answer = make()
    answer.take(delta("@na", num_tokens=2))
    first, last = answer.finish(end())
    assert first == ChatDelta(0, "@na", "", (), (), 2)
    assert last == ChatFinished(0, ChatFinishReason.STOP, StopMatch(stop_string="x"))


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("@f:;", FinishReason.STOP, ChatFinishReason.TOOL_CALLS),
        ("f", FinishReason.STOP, ChatFinishReason.STOP),
        ("@f:1", FinishReason.LENGTH, ChatFinishReason.LENGTH),
        ("@f:;", FinishReason.CANCELLED, ChatFinishReason.CANCELLED),
        ("@f:;", FinishReason.REPETITION, ChatFinishReason.REPETITION),
    ],
)
def test_the_reason_of_the_end(text: str, reason: FinishReason, expected: ChatFinishReason):
    answer = make()
    answer.take(delta(text))
    assert [event.reason for event in answer.finish(end(reason)) if isinstance(event, ChatFinished)] == [expected]


def test_further_calls_are_not_shown_when_one_is_wanted():
    taken = make(is_parallel=False).take(delta("@f:1;@g:2;"))
    assert taken is not None
    assert {call.index for call in taken.tool_calls} == {0}
    assert "".join(call.arguments for call in taken.tool_calls) == "1"


@pytest.mark.parametrize("cut", range(1, 16))
def test_a_resumed_answer_goes_on_where_it_was(cut: int):
    text = "a~r~b@f:12;@g:3"
    whole, resumed = make(), make()
    resumed.skip(text[:cut])
    for character in text[:cut]:
        whole.take(delta(character))
    for character in text[cut:]:
        first, second = whole.take(delta(character)), resumed.take(delta(character))
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert (first.content, first.reasoning, first.tool_calls) == (
                second.content,
                second.reasoning,
                second.tool_calls,
            )
    assert [type(event) for event in whole.finish(end())] == [type(event) for event in resumed.finish(end())]
