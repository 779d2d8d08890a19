"""Where the other engines are, by environment variables, and the environment that vLLM's CPU build needs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bench import engine_flags
from engine_core.model_executor.model_source import resolve_model

VLLM_VENV = "STEPWIRE_BENCH_VLLM_VENV"
LLAMA_BIN = "STEPWIRE_BENCH_LLAMA_BIN"
GGUF = "STEPWIRE_BENCH_GGUF"


class NotInstalledError(Exception):
    """What a comparison needs is not there; the message says how to tell where it is."""


def vllm_python() -> Path:
    """The interpreter of vLLM's own virtual environment."""
    return _existing(VLLM_VENV, "bin/python")


def llama_program(name: str) -> Path:
    """One of the programs of a build of llama.cpp."""
    return _existing(LLAMA_BIN, name)


def model_dir() -> Path:
    """The embedded model as a directory, which vLLM reads too; each engine is told the dtype."""
    return resolve_model(engine_flags.settings(), lambda text: None).path


def bf16_gguf() -> Path:
    """The embedded model for llama.cpp, made once from the GGUF file that it comes in."""
    made = engine_flags.BUILD / "bf16.gguf"
    if not made.exists():
        source = Path(os.environ.get(GGUF, engine_flags.ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
        if not source.exists():
            raise NotInstalledError(f"{source} is not there: set {GGUF}")
        made.parent.mkdir(parents=True, exist_ok=True)
        # Half a file must not pass for a model in the next run.
        partial = made.with_suffix(".partial")
        command = [llama_program("llama-quantize"), "--allow-requantize", source, partial, "BF16"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        partial.replace(made)
    return made


def vllm_environment() -> dict[str, str]:
    """All cores for its workers, its two libraries preloaded, and no network."""
    cores = os.cpu_count() or 1
    own = {
        # By default it keeps one core for its front end, which would halve a machine of two.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(engine_flags.ROOT),
        "PATH": f"{vllm_python().parent}:{os.environ.get('PATH', '')}",
    }
    preloaded = ":".join(map(str, (*_tcmalloc(), *vllm_python().parent.parent.glob("lib/**/libiomp5.so"))))
    return {**_inherited(os.environ), **own, "LD_PRELOAD": preloaded}


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    # Ours are for our engine, and how threads wait is the peer's own choice.
    return {name: value for name, value in environ.items() if not name.startswith(("STEPWIRE_", "OMP_", "KMP_"))}


def _tcmalloc() -> list[Path]:
    return sorted(Path("/usr/lib").glob("*-linux-gnu/libtcmalloc_minimal.so.4"))


def _existing(variable: str, name: str) -> Path:
    directory = os.environ.get(variable)
    if not directory:
        raise NotInstalledError(f"set {variable} (see bench/README.md)")
    path = Path(directory).absolute() / name
    if not path.exists():
        raise NotInstalledError(f"{variable}: {path} is not there")
    return path
