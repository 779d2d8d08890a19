"""Fixtures and plugins of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwire.settings import set_default_variable

# Before any test imports torch: as the engine does, because services and tests share few cores.
set_default_variable("OMP_WAIT_POLICY", "passive")

pytest_plugins = ["skips"]

MODELS_DIR = Path(__file__).parent.parent / "models"


@pytest.fixture(scope="session")
def embedded_model_dir() -> Path:
    """The embedded model as a Hugging Face directory: fetched and converted by the first test run that needs it."""
    # Imported here: most tests need no engine, and some run where its dependencies are missing.
    from engine_core.config import EngineSettings
    from engine_core.model_executor.model_source import resolve_model

    return resolve_model(EngineSettings(models_dir=MODELS_DIR), lambda _: None).path
