"""Fixtures and plugins of all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings

from stepwire.settings import set_default_variable

# Before any test imports torch: as the engine does, because services and tests share few cores.
set_default_variable("OMP_WAIT_POLICY", "passive")

# Before any test imports triton: without a GPU its kernels run in its interpreter, on CPU tensors.
set_default_variable("TRITON_INTERPRET", "1")

# A shell starts background jobs with SIGINT ignored, and so would be every process that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["exported_spans", "file_order", "fuzzing", "skips"]

# Needs a cluster: `make test-cluster` names it.
collect_ignore = ["cluster"]

# Examples of a property test. The scheduler's machine runs twenty times as many: 2 000 are the least for `make test`.
NUM_EXAMPLES = 100
NUM_EXAMPLES_LONG = 500
# The same examples in every run, so that only a change can break a test; the long run looks for new ones.
settings.register_profile("test", max_examples=NUM_EXAMPLES, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=NUM_EXAMPLES_LONG, deadline=None, print_blob=True)
settings.load_profile("test")

MODELS_DIR = Path(__file__).parent.parent / "models"


@pytest.fixture(scope="session")
def embedded_model_dir() -> Path:
    """The embedded model as a Hugging Face directory: fetched and converted by the first test run that needs it."""
    # Imported here: most tests need no engine, and some run where its dependencies are missing.
    from engine_core.config import EngineSettings
    from engine_core.model_executor.model_source import resolve_model

    return resolve_model(EngineSettings(models_dir=MODELS_DIR), lambda _: None).path
