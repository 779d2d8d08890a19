"""The engine's settings that all benchmarks measure with; what one of them needs otherwise it says itself."""

from __future__ import annotations

from pathlib import Path

from engine_core.config import EngineSettings

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "bench"

SETTINGS: dict[str, object] = {
    "model": "embedded",
    "models_dir": ROOT / "models",
    "dtype": "bfloat16",
    # Enough for 64 requests of 192 tokens, and for the longest prompts here.
    "kv_cache_memory": "1GiB",
    "max_model_len": 2048,
}


def settings(**changes: object) -> EngineSettings:
    """As an object, for engines in this process."""
    return EngineSettings(**{**SETTINGS, **changes})  # type: ignore[arg-type]  # checked there


def flags(**changes: object) -> list[str]:
    """As command-line flags, for engines in processes of their own."""
    found = []
    for name, value in {**SETTINGS, **changes}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", str(value)]
    return found
