"""The order of what one prompt of /v1/completions writes, where several choices race."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fakes.fake_logprobs import fake_rows
from fakes.small_tokenizer import byte_level_tokenizer
from frontend.api.openai_http.completion_run import CompletionRun
from frontend.api.openai_http.merging import WholeChoices
from frontend.generation_events import Admitted, ChoiceDelta, ChoiceFinished, CollectorItem, FinishReason, PromptReady
from stepwire.v1.generation_service_pb2 import GenerateRequest

TOKENIZER = byte_level_tokenizer()
PROMPT = TOKENIZER.encode("ab")


def delta(choice: int, text: str) -> ChoiceDelta:
    token_ids = tuple(TOKENIZER.encode(text))
    return ChoiceDelta(choice, text, token_ids, len(token_ids), fake_rows(token_ids, len(PROMPT), 1))


def end(choice: int, reason: FinishReason = FinishReason.LENGTH) -> ChoiceFinished:
    return ChoiceFinished(choice, reason, None, 1)


ROWS = PromptReady((fake_rows(PROMPT[1:], 1, 1),), 0)


def run_of(*news: list[CollectorItem], num_prompt_logprobs: int | None = 1) -> CompletionRun:
    """Two choices whose collector hands out this."""
    left = list(news)

    async def next_news() -> list[CollectorItem]:
        return left.pop(0) if left else []

    run: CompletionRun = CompletionRun(None, None, "id", 0, GenerateRequest())  # type: ignore[arg-type]
    run.generation = SimpleNamespace(next=next_news, model=SimpleNamespace(tokenizer=TOKENIZER))  # type: ignore[assignment]
    output = SimpleNamespace(num_prompt_logprobs=num_prompt_logprobs, num_logprobs=1)
    run.processed = SimpleNamespace(num_choices=2, prompt_token_ids=PROMPT, output=output)  # type: ignore[assignment]
    return run


async def parts_of(run: CompletionRun) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    while events := await run.next():
        parts.extend(run.to_choices(events))
    return parts


async def test_rows_of_an_echoed_prompt_stand_before_those_of_a_choice_that_was_faster():
    run = run_of([Admitted()], [delta(1, "x")], [delta(1, "y"), end(1)], [ROWS, delta(0, "z")], [end(0)])
    whole = WholeChoices()
    whole.add(await parts_of(run))
    first, second = whole.completions()
    assert (first["logprobs"]["tokens"], second["logprobs"]["tokens"]) == (["a", "b", "z"], ["a", "b", "x", "y"])
    assert second["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert (first["finish_reason"], second["finish_reason"], second["text"]) == ("length", "length", "xy")


async def test_what_waits_for_rows_that_never_come_is_written_at_the_end():
    run = run_of([Admitted()], [delta(1, "x")], [end(0, FinishReason.CANCELLED), end(1, FinishReason.CANCELLED)])
    parts = await parts_of(run)
    assert [(part["index"], part["text"], part["finish_reason"]) for part in parts] == [
        (1, "x", None),
        (0, "", "abort"),
        (1, "", "abort"),
    ]


async def test_without_rows_of_the_prompt_nothing_waits():
    run = run_of([Admitted()], [delta(1, "x")], [delta(0, "y")], num_prompt_logprobs=None)
    assert await run.next() == [Admitted()]
    assert await run.next() == [delta(1, "x")]
