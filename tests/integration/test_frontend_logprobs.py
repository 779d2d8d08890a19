"""Log-probabilities through a real frontend and a fake engine: deltas, prompt, choices, resumed streams.

The rows of the fake say what they are about: log-probability -position for the own token, rank 2.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
import pytest

from fakes.fake_engine import FakeEngine
from fakes.small_tokenizer import byte_level_tokenizer
from running_frontend import SERVING, RunningFrontend, failure_of, request, running_frontend
from stepwire.v1 import common_pb2, generation_service_pb2, model_service_pb2
from stepwire.v1.common_pb2 import OutputOptions, TokenLogprobs

TOKENIZER = byte_level_tokenizer()
PROMPT = TOKENIZER.encode("hello world")


def positions(rows: Iterable[TokenLogprobs]) -> list[int]:
    return [round(-row.sampled.logprob) for row in rows]


def own_ids(rows: Iterable[TokenLogprobs]) -> list[int]:
    return [row.sampled.token_id for row in rows]


async def stream_of(frontend: RunningFrontend, message) -> list[generation_service_pb2.GenerateStreamResponse]:
    return [one async for one in frontend.generation.GenerateStream(message)]


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_every_delta_has_the_rows_of_its_tokens(
    frontend: RunningFrontend, engine: FakeEngine, tokens_per_step: int
):
    engine.tokens_per_step = tokens_per_step
    output = OutputOptions(logprobs=2, token_ids=True)
    messages = await stream_of(frontend, request("hello world", max_tokens=7, output=output))
    deltas = [message.delta for message in messages if message.HasField("delta")]
    for delta in deltas:
        assert own_ids(delta.logprobs) == list(delta.token_ids)
        assert b"".join(row.sampled.token_bytes for row in delta.logprobs).decode() == delta.text
    rows = [row for delta in deltas for row in delta.logprobs]
    assert positions(rows) == list(range(2, 9))
    assert all(row.sampled.rank == 2 and len(row.top) == 2 for row in rows)
    assert [entry.rank for entry in rows[0].top] == [1, 2]
    assert rows[0].top[0].token_bytes == TOKENIZER.token_bytes(rows[0].top[0].token_id)


async def test_a_stop_string_keeps_text_ids_and_rows_together(frontend: RunningFrontend):
    message = request("hello world", max_tokens=1000, output=OutputOptions(logprobs=0, token_ids=True))
    message.stop.stop.append("world")
    deltas = [one.delta for one in await stream_of(frontend, message) if one.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == "hello "
    for delta in deltas:
        assert own_ids(delta.logprobs) == list(delta.token_ids)


async def test_prompt_rows_come_once_before_output_and_the_first_token_has_none(frontend: RunningFrontend):
    messages = await stream_of(frontend, request("hello world", max_tokens=2, output=OutputOptions(prompt_logprobs=1)))
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds.count("prompt") == 1
    assert kinds.index("prompt") < kinds.index("delta")
    info = messages[kinds.index("prompt")].prompt
    assert list(info.prompt_token_ids.ids) == PROMPT
    first, *others = info.prompt_logprobs
    assert not first.HasField("sampled")
    assert not first.top
    assert (own_ids(others), positions(others)) == (PROMPT[1:], list(range(1, len(PROMPT))))
    assert all(len(row.top) == 1 for row in others)
    # Nothing was asked for about the output.
    assert not any(message.delta.logprobs for message in messages)


async def test_a_prompt_of_one_token_is_told_too(frontend: RunningFrontend):
    messages = await stream_of(frontend, request("hello", max_tokens=1, output=OutputOptions(prompt_logprobs=5)))
    [info] = [message.prompt for message in messages if message.HasField("prompt")]
    assert list(info.prompt_logprobs) == [TokenLogprobs()]


async def test_unary_has_everything(frontend: RunningFrontend):
    output = OutputOptions(logprobs=1, prompt_logprobs=0, logprob_token_ids=[40, 41])
    answer = await frontend.generation.Generate(request("hello world", max_tokens=4, output=output))
    [completion] = answer.completions
    assert positions(completion.logprobs) == [2, 3, 4, 5]
    assert all({40, 41} < {entry.token_id for entry in row.top} for row in completion.logprobs)
    assert all(len(row.top) == 3 for row in completion.logprobs)
    assert list(answer.prompt_token_ids.ids) == PROMPT
    assert own_ids(answer.prompt_logprobs[1:]) == PROMPT[1:]


async def test_large_rows_are_converted_all_the_same(frontend: RunningFrontend):
    """Above the number of entries that goes to a thread."""
    text = "hello world " * 150
    answer = await frontend.generation.Generate(
        request(text, max_tokens=1, output=OutputOptions(prompt_logprobs=20, logprobs=20))
    )
    prompt = TOKENIZER.encode(text)
    assert len(prompt) * 21 > 2_000
    assert own_ids(answer.prompt_logprobs[1:]) == prompt[1:]
    assert positions(answer.prompt_logprobs[1:]) == list(range(1, len(prompt)))


async def test_choices_have_rows_of_their_own_and_one_prompt(frontend: RunningFrontend, engine: FakeEngine):
    message = request(
        "hello world",
        max_tokens=3,
        sampling=common_pb2.SamplingParams(n=3, temperature=1),
        output=OutputOptions(logprobs=0, prompt_logprobs=0),
    )
    answer = await frontend.generation.Generate(message)
    assert [positions(completion.logprobs) for completion in answer.completions] == [[2, 3, 4]] * 3
    assert len(answer.prompt_logprobs) == len(PROMPT)
    assert [add.HasField("prompt_logprobs") for add in engine.adds] == [True, False, False]
    assert [add.HasField("logprobs") for add in engine.adds] == [True] * 3


async def test_a_resumed_stream_has_rows_for_what_is_new(frontend: RunningFrontend):
    message = request("hello world", max_tokens=4, output=OutputOptions(logprobs=0, token_ids=True))
    whole = (await frontend.generation.Generate(message)).completions[0]
    message.resume_output_token_ids.ids.extend(whole.token_ids[:2])
    rest = (await frontend.generation.Generate(message)).completions[0]
    assert list(rest.logprobs) == list(whole.logprobs[2:])


async def test_the_model_says_how_many_may_be_asked_for(engine: FakeEngine, tmp_path):
    engine.ready.max_logprobs = 5
    async with running_frontend(engine.endpoint, cache_dir=tmp_path) as frontend:
        await frontend.wait_for_health(SERVING)
        model = (await frontend.models.GetModel(model_service_pb2.GetModelRequest())).model
        assert model.capabilities.max_logprobs == 5
        failure = await failure_of(frontend.generation.Generate(request(output=OutputOptions(logprobs=6))))
        assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["output.logprobs"])
        assert "6 asks for 6, at most 5" in failure.message


async def test_an_answer_too_large_for_one_message_is_refused_and_aborted(
    frontend: RunningFrontend, engine: FakeEngine, monkeypatch
):
    monkeypatch.setattr("frontend.api.generation_messages.MAX_ENTRIES_OF_ANSWER", 20)
    message = request("hello world", max_tokens=1000, output=OutputOptions(logprobs=4))
    failure = await failure_of(frontend.generation.Generate(message))
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["output.logprobs"])
    assert "stream it" in failure.message
    await engine.wait_until(lambda: engine.num_live == 0)
