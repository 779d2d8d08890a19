"""A tokenizer, a fake engine that serves it, and a frontend attached to that engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fakes.fake_engine import FakeEngine
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from running_frontend import SERVING, RunningFrontend, running_frontend


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return write_model_dir(directory, byte_level_backend(), config={"eos_token_id": 0})


@pytest.fixture
async def engine(tokenizer_dir: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(tokenizer_dir, vocab_size=400).running() as fake:
        yield fake


@pytest.fixture
async def frontend(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[RunningFrontend]:
    async with running_frontend(engine.endpoint, cache_dir=tmp_path / "cache") as running:
        await running.wait_for_health(SERVING)
        yield running
