"""Rows on their way: they leave with their tokens, a prompt's when it is complete; others are an error."""

from __future__ import annotations

import pytest

from fakes.fake_logprobs import fake_rows
from frontend.engine_outputs import EngineOutput
from frontend.logprobs import HeldLogprobs, PromptLogprobs
from stepwire.packed_logprobs import PackedLogprobs

PROMPT = [50, 51, 52, 53]


def prompt_output(start: int, end: int, *, new: tuple[int, ...] = (), handle: int = 1) -> EngineOutput:
    return EngineOutput(handle, new, prompt_logprobs=fake_rows(PROMPT[start:end], start, 2))


class TestHeld:
    def test_rows_leave_in_order_with_their_tokens(self) -> None:
        held = HeldLogprobs(3)
        held.append(fake_rows([1, 2], 0, 2), 2)
        held.append(None, 0)
        held.append(fake_rows([3], 2, 2), 1)
        assert held.take(0) is None
        assert held.take(1) == fake_rows([1], 0, 2)
        assert held.take(2) == fake_rows([2, 3], 1, 2)

    @pytest.mark.parametrize(
        ("rows", "words"),
        [(None, "without"), (fake_rows([1], 0, 2), "2 rows"), (fake_rows([1, 2], 0, 1), "rows of 2 entries came, 3")],
        ids=["none", "too few", "narrow"],
    )
    def test_tokens_without_fitting_rows_are_an_error(self, rows: PackedLogprobs | None, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            HeldLogprobs(3).append(rows, 2)


class TestPrompt:
    def test_complete_with_the_first_token_and_given_once(self) -> None:
        prompt = PromptLogprobs(1, 4, 3)
        assert prompt.take(prompt_output(1, 3)) is None
        assert prompt.take(EngineOutput(1)) is None
        parts = prompt.take(prompt_output(3, 4, new=(9,)))
        assert parts is not None
        assert PackedLogprobs.join(parts) == fake_rows(PROMPT[1:], 1, 2)
        assert prompt.take(EngineOutput(1, (10,))) is None

    def test_other_choices_bring_nothing(self) -> None:
        prompt = PromptLogprobs(1, 4, 3)
        assert prompt.take(EngineOutput(2, (9,))) is None
        assert prompt.take(prompt_output(1, 4, new=(9,))) is not None

    def test_a_prompt_of_one_token_has_no_rows(self) -> None:
        assert PromptLogprobs(1, 1, 3).take(EngineOutput(1, (9,))) == []

    @pytest.mark.parametrize(("start", "end"), [(1, 3), (0, 4)], ids=["lost", "repeated"])
    def test_a_wrong_number_of_rows_is_an_error(self, start: int, end: int) -> None:
        with pytest.raises(ValueError, match=f"{end - start} rows came for a prompt that needs 3"):
            PromptLogprobs(1, 4, 3).take(prompt_output(start, end, new=(9,)))

    def test_rows_of_another_width_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="rows of 3 entries came, 2 were asked for"):
            PromptLogprobs(1, 4, 2).take(prompt_output(1, 4))
