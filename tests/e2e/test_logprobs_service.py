"""Log-probabilities from the real model through both processes equal transformers' within 1e-3.

The engine runs with a small cache and chunks of 16, so that requests at once are cut, preempted and computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from fakes.tiny_models import load_reference
from running_stack import SERVING, Frontend, Service, running_stack
from stepwire.v1 import common_pb2
from stepwire.v1.generation_service_pb2 import GenerateRequest, GenerateResponse

pytestmark = pytest.mark.slow

TIMEOUT_S = 120.0
TOLERANCE = 1e-3
NUM_TOP = 4
CHOSEN = [11, 12]
TEXTS = [
    "The capital of France is",
    "日本の首都は 🙂",
    "def fibonacci(n):\n    ",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "In computer science, paging is a memory management scheme. " * 8,
    "Once upon a time",
]
FLAGS = ("--num-blocks", "16", "--max-model-len", "-1", "--max-num-batched-tokens", "16", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def stack(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Frontend]]:
    with running_stack(embedded_model_dir, tmp_path_factory.mktemp("cache")) as stack:
        engine = stack.engine(*FLAGS)
        frontend = stack.frontend(engine)
        frontend.wait_for_health(SERVING)
        yield engine, frontend


class Judge:
    """Checks an answer with one forward pass of plain transformers over prompt and answer."""

    def __init__(self, model_dir: Path) -> None:
        self._model: Any = load_reference(model_dir)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)

    @torch.inference_mode()
    def check(self, answer: GenerateResponse) -> None:
        prompt = list(answer.prompt_token_ids.ids)
        for completion in answer.completions:
            output = list(completion.token_ids)
            logits = self._model(torch.tensor([[*prompt, *output]])).logits[0]
            expected = logits.double().log_softmax(dim=-1)
            self._check_rows(completion.logprobs, output, expected[len(prompt) - 1 :], NUM_TOP + len(CHOSEN))
            joined = b"".join(row.sampled.token_bytes for row in completion.logprobs)
            assert joined.decode("utf-8", "replace") == completion.text
            for row in completion.logprobs:
                assert set(CHOSEN) <= {entry.token_id for entry in row.top}
        first, *rest = answer.prompt_logprobs
        assert first == common_pb2.TokenLogprobs()
        self._check_rows(rest, prompt[1:], expected, NUM_TOP)
        assert b"".join(row.sampled.token_bytes for row in rest).decode("utf-8", "ignore") in self._decode(prompt)

    def _check_rows(
        self, rows: Sequence[common_pb2.TokenLogprobs], own: list[int], expected: torch.Tensor, most: int
    ) -> None:
        assert [row.sampled.token_id for row in rows] == own
        for row, values in zip(rows, expected, strict=False):
            entries = [row.sampled, *row.top]
            for entry in entries:
                assert entry.logprob == pytest.approx(float(values[entry.token_id]), abs=TOLERANCE)
            assert NUM_TOP <= len(row.top) <= most
            found = [entry.logprob for entry in row.top]
            assert found == sorted(found, reverse=True)
            best = values.topk(NUM_TOP).values.tolist()
            assert found[:NUM_TOP] == pytest.approx(best, abs=TOLERANCE)
            own_value = values[row.sampled.token_id]
            assert row.sampled.rank <= int((values > own_value - TOLERANCE).sum()) + 1
            assert row.sampled.rank > int((values > own_value + TOLERANCE).sum())

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text


def ask(text: str, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        text=text,
        sampling=common_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        stop=common_pb2.StopConditions(max_tokens=24, ignore_eos=True),
        output=common_pb2.OutputOptions(
            token_ids=True,
            skip_special_tokens=False,
            logprobs=NUM_TOP,
            prompt_logprobs=NUM_TOP,
            logprob_token_ids=CHOSEN,
        ),
    )


def test_answers_at_once_agree_with_transformers(stack: tuple[Service, Frontend], embedded_model_dir: Path) -> None:
    engine, frontend = stack
    requests = [ask(text, temperature=0) for text in TEXTS]
    requests += [ask(text, temperature=1, top_p=0.9, presence_penalty=0.5, seed=3) for text in TEXTS]
    requests += [ask(TEXTS[0], temperature=1, n=3, seed=5)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda one: frontend.generation.Generate(one, timeout=TIMEOUT_S), requests))
    assert engine.metric("stepwire_engine_core_preemptions_total") > 0
    judge = Judge(embedded_model_dir)
    for answer in answers:
        judge.check(answer)


def test_a_stream_agrees_with_the_unary_answer(stack: tuple[Service, Frontend]) -> None:
    _, frontend = stack
    request = ask(TEXTS[3], temperature=0)
    request.stop.stop.append("zzzzzzzz")
    whole = frontend.generation.Generate(request, timeout=TIMEOUT_S)
    messages = list(frontend.generation.GenerateStream(request, timeout=TIMEOUT_S))
    [prompt] = [message.prompt for message in messages if message.HasField("prompt")]
    assert _near(prompt.prompt_logprobs, whole.prompt_logprobs)
    deltas = [message.delta for message in messages if message.HasField("delta")]
    assert _near([row for delta in deltas for row in delta.logprobs], whole.completions[0].logprobs)
    for delta in deltas:
        assert [row.sampled.token_id for row in delta.logprobs] == list(delta.token_ids)
        assert b"".join(row.sampled.token_bytes for row in delta.logprobs).decode() == delta.text


def _near(found: Sequence[common_pb2.TokenLogprobs], expected: Sequence[common_pb2.TokenLogprobs]) -> bool:
    """Equal but for the last digits, which depend on what else was in the batch."""
    return len(found) == len(expected) and all(
        one.sampled.token_id == other.sampled.token_id
        and abs(one.sampled.logprob - other.sampled.logprob) < TOLERANCE
        and len(one.top) == len(other.top)
        for one, other in zip(found, expected, strict=True)
    )
