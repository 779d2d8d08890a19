"""An LLMEngine, or an LLM, around the fake executor and a small byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from engine_core.config import EngineSettings
from engine_core.model_executor.executor import FailureCallback
from engine_core.resolved_config import ServedModel
from engine_core.startup import LoadedModel, Progress
from fakes.fake_executor import FAKE_VOCABULARY, FakeExecutor
from fakes.small_tokenizer import byte_level_backend, write_model_dir
from offline.llm import LLM
from offline.llm_engine import LLMEngine
from stepwire import tokenizer_archive

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
DEFAULTS: dict[str, object] = {"num_blocks": 64, "block_size": 4, "max_model_len": -1}


class FakeLoader:
    """A model loader; the executor it made is kept for a look inside."""

    def __init__(self, *, has_grammars: bool = False) -> None:
        self._vocabulary = FAKE_VOCABULARY if has_grammars else None
        self.executor: FakeExecutor

    def __call__(self, settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
        self.executor = FakeExecutor(settings, failure_callback)
        with TemporaryDirectory() as directory:
            path = write_model_dir(Path(directory), byte_level_backend(), config={"eos_token_id": 2})
            (path / "chat_template.jinja").write_text(TEMPLATE)
            archive = tokenizer_archive.build(path)
        return LoadedModel(self.executor, ServedModel("fake", "", "sha"), archive, self._vocabulary)


def make_engine(loader: FakeLoader, **settings: object) -> LLMEngine:
    return LLMEngine(EngineSettings(**{"async_scheduling": False, **DEFAULTS, **settings}), loader)  # type: ignore[arg-type]


def make_llm(monkeypatch, loader: FakeLoader, **settings: object) -> LLM:
    """As a caller makes it, but for the loader."""
    monkeypatch.setattr("offline.llm.LLMEngine", lambda engine_settings: LLMEngine(engine_settings, loader))
    return LLM("fake", **{**DEFAULTS, **settings})


def core_of(engine: LLMEngine):
    core = engine._client._core
    assert core is not None
    return core


def assert_nothing_left(engine: LLMEngine, loader: FakeLoader | None = None) -> None:
    """Every map is empty, every block free, and the workers know of no request."""
    assert not engine.has_unfinished_requests()
    assert (engine._answers, engine._by_handle) == ({}, {})
    processor = engine._model.output_processor
    assert (processor.num_requests, processor.num_choices) == (0, 0)
    core = core_of(engine)
    assert core.scheduler.requests == {}
    assert core.scheduler.check_integrity() == []
    assert core.scheduler.kv_cache_manager.pool.num_used == 0
    if loader is not None:
        assert loader.executor.num_known_requests == 0
