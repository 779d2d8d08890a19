"""NaN in the logits: which rows have it, and which requests a real model names for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.executor import WeightTensor
from engine_core.model_executor.in_process_executor import InProcessExecutor
from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.parallel.worker_group import WorkerGroup
from engine_core.model_executor.sampler.nan_check import rows_with_nan
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from engine_core.scheduler.request import RequestKey, SamplingParams
from fakes.one_process_group import OneProcessGroup
from fakes.tiny_models import VOCAB_SIZE, save_tiny_model, tiny_configs

A, B, C = ("s", 1), ("s", 2), ("s", 3)
# The token whose embedding has become NaN.
BROKEN = 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_is_named_wherever_its_nan_is_and_not_for_infinities(dtype: torch.dtype) -> None:
    logits = torch.linspace(-9, 9, 5 * 1001).reshape(5, 1001).to(dtype)
    logits[0, 0] = logits[1, -1] = logits[2, 500] = math.nan
    logits[2, 501], logits[3, 7], logits[3, 8] = math.inf, math.inf, -math.inf
    assert rows_with_nan(logits).tolist() == [True, True, True, False, False]
    assert rows_with_nan(torch.full((1, 3), -math.inf, dtype=dtype)).tolist() == [False]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Its embedding is not its output matrix, where NaN would be in a column of every row.
    return save_tiny_model(tmp_path_factory.mktemp("nan") / "llama", tiny_configs()["llama3_rope"])


def make_executor(model_dir: Path, group: WorkerGroup | None = None, **settings: object) -> Iterator[InProcessExecutor]:
    defaults = {"model": "m", "device": "cpu", "max_num_seqs": 4, "block_size": 4, "num_blocks": 50, "check_nan": True}
    executor = InProcessExecutor(EngineSettings(**{**defaults, **settings}), model_dir, lambda _: None, group)
    executor.initialize_kv_cache(50, 4)
    yield executor
    executor.shutdown()


def set_weight(executor: InProcessExecutor, name: str, values: np.ndarray) -> None:
    executor.update_weights([WeightTensor(name, "float32", values.shape, bytearray(values.tobytes()))])


def break_one_token(executor: InProcessExecutor) -> None:
    embedding = np.random.default_rng(1).normal(size=(VOCAB_SIZE, 32)).astype(np.float32)
    embedding[BROKEN] = math.nan
    set_weight(executor, "model.embed_tokens.weight", embedding)


def new(key: RequestKey, prompt: list[int], temperature: float = 0.0) -> NewRequestData:
    sampling = SamplingParams(temperature=temperature, seed=7)
    return NewRequestData(key, prompt, [], sampling, 0, (), (list(range(8 * key[1], 8 * key[1] + 8)),), 0)


def nan_keys(
    executor: InProcessExecutor, scheduled: dict[RequestKey, int], *requests: NewRequestData
) -> list[RequestKey]:
    executor.execute_model(SchedulerOutput(1, list(requests), [], scheduled, sum(scheduled.values()), []))
    return executor.sample_tokens(None).result(timeout=60).nan_keys


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_model_names_the_requests_that_its_nan_reaches(
    model_dir: Path, temperature: float, implementation: str
) -> None:
    for executor in make_executor(model_dir, model_impl=implementation):
        break_one_token(executor)
        # The third does not sample in this step. The cache keeps no NaN, so that its next token is sound.
        requests = [new(A, [5, 6, 7]), new(B, [5, 6, BROKEN], temperature), new(C, [5, BROKEN, 7])]
        assert nan_keys(executor, {A: 3, B: 3, C: 2}, *requests) == [B]
        assert nan_keys(executor, {C: 1, A: 1}) == []


def test_nothing_is_looked_for_unless_asked(model_dir: Path) -> None:
    for executor in make_executor(model_dir, check_nan=False):
        break_one_token(executor)
        assert nan_keys(executor, {B: 1}, new(B, [BROKEN])) == []


def test_the_worker_that_samples_for_all_names_them(model_dir: Path) -> None:
    group = OneProcessGroup(Place(0, 2, 1))
    for executor in make_executor(model_dir, group, tensor_parallel_size=2):
        set_weight(executor, "model.norm.weight", np.full(32, math.nan, np.float32))
        assert nan_keys(executor, {A: 3, B: 2}, new(A, [5, 6, 7]), new(B, [5, 6, 7])) == [A]
