"""Greedy tokens in fp32 equal those of transformers, however scheduler and cache cut the work.

Each answer is checked with one forward pass of the reference over prompt and answer: every token must be the arg-max
of the logits before it, which is what `generate` would have chosen. `generate` itself is run on some of the prompts.
Only where the reference hardly prefers its token (top two logits nearer than 1e-3, so that the order of a sum
decides) may the engine choose the other one; such near-ties are counted and bounded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core_driver import CoreDriver

pytestmark = pytest.mark.slow

MAX_TOKENS = 16
NEAR_TIE = 1e-3
MAX_NEAR_TIES = 2
NUM_GENERATED = 6

_TEXTS = [
    "a",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "for (int i = 0; i < n; ++i) {",
    "SELECT name, COUNT(*) FROM users WHERE",
    "#!/bin/bash\nset -euo pipefail\n",
    '{"name": "stepwire", "version": ',
    "<html><head><title>",
    "import torch\nimport torch.nn as nn\n\nclass Attention(nn.Module):\n",
    "Die Hauptstadt von Deutschland ist",
    "La plus grande ville du Brésil est",
    "Столица России —",
    "日本の首都は",
    "中国的首都是",
    "عاصمة مصر هي",
    "भारत की राजधानी",
    "서울은 대한민국의",
    "Η πρωτεύουσα της Ελλάδας",
    "😀 😃 😄 😁 😆",
    "👩‍👩‍👧‍👦 family and 🏳️‍🌈 flag",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 + 25?\nA:",
    "Once upon a time, in a small village by the sea,",
    "To be, or not to be, that is",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n",
    "\n\n\n",
    "     ",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "In computer science, paging is a memory management scheme. " * 14,
    "Water boils at 100 degrees. " * 85,
]


@pytest.fixture(scope="module")
def prompts(embedded_model_dir: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(embedded_model_dir)
    prompts = [tokenizer(text)["input_ids"] for text in _TEXTS]
    prompts[-1] = prompts[-1][:600]
    assert len(prompts) >= 30
    assert min(map(len, prompts)) == 1
    assert max(map(len, prompts)) > 500
    return prompts


class Reference:
    """The model in plain transformers, and what it has judged already."""

    def __init__(self, model_dir: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._num_near_ties: dict[tuple[int, ...], int] = {}

    def check(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        """Every token of every answer is the reference's choice, but for a few near-ties."""
        num_near_ties = sum(map(self._judge, prompts, answers))
        assert num_near_ties <= MAX_NEAR_TIES

    @torch.inference_mode()
    def _judge(self, prompt: list[int], answer: list[int]) -> int:
        assert len(answer) == MAX_TOKENS
        sequence = (*prompt, *answer)
        if sequence not in self._num_near_ties:
            logits = self._model(torch.tensor([sequence[:-1]])).logits[0, len(prompt) - 1 :]
            best = logits.max(dim=-1).values
            chosen = logits.gather(1, torch.tensor([answer]).T)[:, 0]
            gaps = best - chosen
            assert gaps.max() < NEAR_TIE, f"prompt {prompt[:8]}…, answer {answer}: gaps {gaps.tolist()}"
            self._num_near_ties[sequence] = int((gaps > 0).sum())
        return self._num_near_ties[sequence]

    @torch.inference_mode()
    def generate(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            # The engine is told to ignore eos; the reference then must not stop at it either.
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


@pytest.fixture(scope="module")
def reference(embedded_model_dir: Path) -> Reference:
    return Reference(embedded_model_dir)


@pytest.fixture(scope="module")
def driver(embedded_model_dir: Path) -> Iterator[CoreDriver]:
    driver = CoreDriver(embedded_model_dir, num_blocks=400, async_scheduling=True)
    implementation = driver.core.config.model_info.implementation
    assert implementation.startswith("native/"), "another backend would be compared"
    assert not implementation.endswith("/torch"), "the compiled kernels would not be compared"
    yield driver
    driver.core.shutdown()


def test_alone(driver: CoreDriver, reference: Reference, prompts: list[list[int]]) -> None:
    reference.check(prompts, [driver.generate([prompt], MAX_TOKENS)[0] for prompt in prompts])


def test_generate_itself_agrees(driver: CoreDriver, reference: Reference, prompts: list[list[int]]) -> None:
    some = prompts[1 :: len(prompts) // NUM_GENERATED][:NUM_GENERATED]
    assert driver.generate(some, MAX_TOKENS) == [reference.generate(prompt) for prompt in some]


def test_all_at_once_and_again_from_the_prefix_cache(
    driver: CoreDriver, reference: Reference, prompts: list[list[int]]
) -> None:
    reference.check(prompts, driver.generate(prompts, MAX_TOKENS))
    hits_before = driver.core.scheduler.stats().prefix_hit_tokens
    reference.check(prompts, driver.generate(prompts, MAX_TOKENS))
    assert driver.core.scheduler.stats().prefix_hit_tokens - hits_before >= 16 * (len(prompts[-1]) // 16 - 1)


def test_in_chunks_of_16_tokens(embedded_model_dir: Path, reference: Reference, prompts: list[list[int]]) -> None:
    driver = CoreDriver(
        embedded_model_dir,
        num_blocks=400,
        max_num_batched_tokens=16,
        max_num_seqs=16,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    reference.check(prompts, driver.generate(prompts, MAX_TOKENS))
    driver.core.shutdown()


def test_with_preemption_in_a_tiny_cache(
    embedded_model_dir: Path, reference: Reference, prompts: list[list[int]]
) -> None:
    driver = CoreDriver(embedded_model_dir, num_blocks=42)
    reference.check(prompts, driver.generate(prompts, MAX_TOKENS))
    assert driver.core.scheduler.stats().num_preemptions > 0
    driver.core.shutdown()


# With three key heads the model can be cut into three parts, not into two.
@pytest.mark.parametrize(("seed", "num_shards"), [(1, 1), (3, 1), (9, 3)])
def test_features_at_random(
    embedded_model_dir: Path, reference: Reference, prompts: list[list[int]], seed: int, num_shards: int
) -> None:
    rng = random.Random(seed)
    driver = CoreDriver(
        embedded_model_dir,
        num_blocks=rng.choice([42, 60, 100]),
        max_num_seqs=rng.choice([4, 9, 16]),
        max_num_batched_tokens=rng.choice([24, 100, 700]),
        long_prefill_token_threshold=rng.choice([0, 13]),
        max_num_partial_prefills=rng.choice([0, 2]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        watermark=rng.choice([0.0, 0.1]),
        enable_prefix_caching=rng.random() < 0.7,
        async_scheduling=rng.random() < 0.7,
        tensor_parallel_size=num_shards,
    )
    try:
        # Some again, for what is in the prefix cache by then.
        for some in (rng.sample(prompts, len(prompts)), rng.sample(prompts, 5)):
            keys = [driver.add(prompt, MAX_TOKENS, priority=rng.randrange(3)) for prompt in some]
            driver.run()
            reference.check(some, [driver.tokens[key] for key in keys])
    finally:
        driver.core.shutdown()
