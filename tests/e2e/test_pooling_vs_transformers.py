"""Vectors of the engine core equal those made of transformers' last_hidden_state, within 1e-4 once they are scaled.

Whatever cuts the work: whole prompts, chunks, preemption in a tiny cache, prefix hits of neighbours, decodes beside.
With each backend; on small random models of several families, and on the embedded model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from core_driver import CoreDriver
from engine_core.scheduler.output import FinishReason
from engine_core.scheduler.pooling import ModelPooling, PoolingParams, PoolingType
from engine_core.scheduler.request import RequestKey
from fakes.tiny_models import VOCAB_SIZE, load_reference, save_tiny_model, tiny_configs

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
KINDS = list(PoolingType)
TEXTS = [
    "Paris is the capital of France.",
    "A short one",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 6,
    "Paris is the capital of France. It lies on the Seine, and is twice as old as it looks. " * 3,
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Reference:
    """The model in plain transformers."""

    def __init__(self, model_dir: Path) -> None:
        self._model: Any = load_reference(model_dir).base_model
        self._hidden: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def vector(self, prompt: list[int], kind: PoolingType, num_dimensions: int | None = None) -> np.ndarray:
        """Of unit length."""
        if tuple(prompt) not in self._hidden:
            self._hidden[tuple(prompt)] = self._model(torch.tensor([prompt])).last_hidden_state[0].double()
        hidden = self._hidden[tuple(prompt)]
        rows = {PoolingType.MEAN: hidden.mean(dim=0), PoolingType.CLS: hidden[0], PoolingType.LAST: hidden[-1]}
        vector = rows[kind][:num_dimensions]
        return (vector / vector.norm()).numpy()


class Asked:
    """Requests that pool, and what is expected of each."""

    def __init__(self, driver: CoreDriver, reference: Reference) -> None:
        self._driver = driver
        self._reference = reference
        self._asked: dict[RequestKey, np.ndarray] = {}

    def add(self, prompt: list[int], kind: PoolingType, num_dimensions: int | None = None) -> None:
        key = self._driver.add(
            prompt, 0, pooling=PoolingParams(type=kind, is_normalized=True, num_dimensions=num_dimensions)
        )
        self._asked[key] = self._reference.vector(prompt, kind, num_dimensions)

    def check(self) -> None:
        for key, expected in self._asked.items():
            assert self._driver.finishes[key] is FinishReason.STOP
            assert self._driver.tokens[key] == []
            found = np.frombuffer(self._driver.pooled[key], dtype="<f4")
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_small_models_pool_as_transformers_does_in_chunks_and_beside_decodes(
    family: str, model_impl: str, tmp_path: Path
) -> None:
    model_dir = save_tiny_model(tmp_path / family, tiny_configs()[family])
    limits = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 12}
    driver = CoreDriver(model_dir, model_impl=model_impl, **limits)
    asked = Asked(driver, Reference(model_dir))
    prompts = [random_prompt(length, seed) for seed, length in enumerate((1, 5, 13, 40))]
    # Shares its beginning with the longest, which the cache then has.
    prompts.append([*prompts[-1][:30], 7, 8, 9])
    decodes = [driver.add(random_prompt(6, 50 + index), 30) for index in range(2)]
    for prompt in prompts:
        for kind in KINDS:
            asked.add(prompt, kind)
    asked.add(prompts[2], PoolingType.MEAN, 5)
    driver.run()
    asked.check()
    assert [len(driver.tokens[key]) for key in decodes] == [30, 30]
    assert driver.core.scheduler.stats().prefix_hit_tokens > 0


def test_preemption_changes_no_vector(tmp_path: Path) -> None:
    """The cache is so small that prompts which are half computed have to go and come again."""
    model_dir = save_tiny_model(tmp_path / "llama", tiny_configs()["llama"])
    limits = {"num_blocks": 20, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 6}
    driver = CoreDriver(model_dir, reserve_full_prompt=False, **limits)
    asked = Asked(driver, Reference(model_dir))
    for index in range(2):
        driver.add(random_prompt(4, 70 + index), 40)
        for place, kind in enumerate(KINDS):
            asked.add(random_prompt(45, 80 + 10 * index + place), kind)
    driver.run()
    asked.check()
    assert any(driver.num_preemptions[key] for key in driver.pooled)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_the_embedded_model_pools_as_transformers_does(embedded_model_dir: Path, model_impl: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)
    limits = {"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64, "num_threads": 2}
    driver = CoreDriver(embedded_model_dir, model_impl=model_impl, **limits)
    asked = Asked(driver, Reference(embedded_model_dir))
    decode = driver.add(tokenizer.encode("Once upon a time"), 16)
    for text in TEXTS:
        for kind in KINDS:
            asked.add(tokenizer.encode(text), kind)
    driver.run()
    asked.check()
    assert len(driver.tokens[decode]) == 16


def test_a_checkpoint_of_sentence_transformers_is_pooled_as_its_files_say(tmp_path: Path) -> None:
    """Its weights are those of the decoder alone, under names of their own."""
    config = tiny_configs()["qwen3"]
    config.tie_word_embeddings = True
    whole = save_tiny_model(tmp_path / "whole", config)
    model_dir = tmp_path / "decoder"
    load_reference(whole).base_model.save_pretrained(model_dir)
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    modules.append({"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"})
    (model_dir / "modules.json").write_text(json.dumps(modules))
    (model_dir / "1_Pooling").mkdir()
    (model_dir / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    driver = CoreDriver(model_dir, num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=12)
    assert driver.core.config.pooling == ModelPooling(PoolingType.MEAN, is_normalized=True)
    prompt = random_prompt(20, 7)
    key = driver.add(prompt, 0, pooling=PoolingParams())
    driver.run()
    found = np.frombuffer(driver.pooled[key], dtype="<f4")
    np.testing.assert_allclose(found, Reference(whole).vector(prompt, PoolingType.MEAN), rtol=0, atol=TOLERANCE)
