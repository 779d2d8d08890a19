"""The pooling of hidden states over chunks, and what the files of a model say of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.model_executor.pooling import Pooler
from engine_core.model_executor.pooling_files import read_pooling
from engine_core.scheduler.pooling import DEFAULT_POOLING, ModelPooling, PoolingParams, PoolingType
from stepwire.errors import InvariantViolation

HIDDEN = torch.arange(1.0, 31.0).reshape(10, 3) ** 1.5
EXPECTED = {PoolingType.MEAN: HIDDEN.double().mean(0), PoolingType.LAST: HIDDEN[-1], PoolingType.CLS: HIDDEN[0]}


def vector_of(params: PoolingParams, *bounds: int) -> np.ndarray:
    """Of HIDDEN in the chunks that begin at the bounds; a bound of 0 again is a restart."""
    pooler = Pooler(params)
    ends = [*(end or 10 for end in bounds[1:]), 10]
    for start, end in zip(bounds, ends, strict=True):
        chunk = HIDDEN[start:end].clone()
        pooler.take(chunk, start)
        # The next step writes over them.
        chunk.fill_(-1)
    return np.frombuffer(pooler.vector(), dtype="<f4")


@pytest.mark.parametrize("kind", PoolingType)
@pytest.mark.parametrize("bounds", [(0,), (0, 4, 5), (0, 1, 9)])
def test_chunks_give_the_vector_of_the_whole_prompt(kind: PoolingType, bounds: tuple[int, ...]) -> None:
    vector = vector_of(PoolingParams(type=kind, is_normalized=False), *bounds)
    np.testing.assert_allclose(vector, EXPECTED[kind].numpy(), rtol=1e-6)


@pytest.mark.parametrize("kind", PoolingType)
def test_a_prompt_that_begins_again_is_pooled_once(kind: PoolingType) -> None:
    pooler = Pooler(PoolingParams(type=kind, is_normalized=False))
    for start, end in ((0, 4), (4, 7), (0, 5), (5, 10)):
        pooler.take(HIDDEN[start:end], start)
    np.testing.assert_allclose(np.frombuffer(pooler.vector(), "<f4"), EXPECTED[kind].numpy(), rtol=1e-6)


def test_the_last_token_needs_no_others_and_the_mean_does() -> None:
    last = Pooler(PoolingParams(type=PoolingType.LAST, is_normalized=False))
    last.take(HIDDEN[6:], 6)
    assert np.frombuffer(last.vector(), "<f4").tolist() == HIDDEN[-1].tolist()
    with pytest.raises(InvariantViolation, match="from 6 on behind the first 0"):
        Pooler(PoolingParams(type=PoolingType.MEAN)).take(HIDDEN[6:], 6)


def test_dimensions_are_cut_before_the_vector_is_scaled() -> None:
    vector = vector_of(PoolingParams(type=PoolingType.LAST, is_normalized=True, num_dimensions=2), 0)
    expected = HIDDEN[-1, :2] / HIDDEN[-1, :2].norm()
    np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-6)


def test_a_vector_of_zeros_stays_one() -> None:
    pooler = Pooler(PoolingParams(type=PoolingType.MEAN, is_normalized=True))
    pooler.take(torch.zeros(2, 3), 0)
    assert np.frombuffer(pooler.vector(), "<f4").tolist() == [0.0, 0.0, 0.0]


def test_what_a_request_leaves_open_is_the_models() -> None:
    model = ModelPooling(PoolingType.CLS, is_normalized=False)
    assert PoolingParams().completed(model) == PoolingParams(type=PoolingType.CLS, is_normalized=False)
    own = PoolingParams(is_normalized=True, num_dimensions=3)
    assert own.completed(model) == PoolingParams("embed", PoolingType.CLS, True, 3)


def write_modules(directory: Path, switch: str, *kinds: str) -> None:
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"1_{kind}"} for kind in kinds]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    config = {"word_embedding_dimension": 3, "pooling_mode_max_tokens": False, switch: True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("switch", "kinds", "expected"),
    [
        ("pooling_mode_mean_tokens", ["Transformer", "Pooling"], ModelPooling(PoolingType.MEAN, False)),
        ("pooling_mode_cls_token", ["Transformer", "Pooling", "Normalize"], ModelPooling(PoolingType.CLS, True)),
        ("pooling_mode_lasttoken", ["Transformer", "Pooling", "Normalize"], ModelPooling(PoolingType.LAST, True)),
        # Not ours to compute.
        ("pooling_mode_max_tokens", ["Transformer", "Pooling"], DEFAULT_POOLING),
        ("pooling_mode_mean_tokens", ["Transformer", "Pooling", "Dense"], DEFAULT_POOLING),
        ("pooling_mode_mean_tokens", ["Transformer"], DEFAULT_POOLING),
    ],
)
def test_the_files_of_sentence_transformers_are_read(
    switch: str, kinds: list[str], expected: ModelPooling, tmp_path: Path
) -> None:
    write_modules(tmp_path, switch, *kinds)
    assert read_pooling(tmp_path) == expected


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"type": "a.Pooling"}]'])
def test_files_that_are_none_give_the_default(text: str, tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == DEFAULT_POOLING
    (tmp_path / "modules.json").write_text(text)
    assert read_pooling(tmp_path) == DEFAULT_POOLING
