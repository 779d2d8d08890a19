"""`--model` to a local Hugging Face directory: the embedded default, a .gguf file, a directory or a hub id.

Used by the thread that starts the engine. Never loads weights into memory, except to convert a GGUF once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine_core.config import EngineSettings
from engine_core.model_executor.embedded_model import NAME, prepare_embedded_model
from engine_core.model_executor.gguf_conversion import prepare_gguf_model
from engine_core.model_executor.model_cache import Progress
from engine_core.model_executor.startup_error import StartupError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# Top level only: repositories keep other formats of the same weights in folders.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine. `name` is what clients call it; `revision` is a hub commit, else empty."""

    path: Path
    name: str
    revision: str = ""


def resolve_model(settings: EngineSettings, progress: Progress) -> ResolvedModel:
    """Find, fetch or convert what --model names. Raises StartupError with one sentence that names the flag."""
    resolved = _resolve(settings, progress)
    _require_loadable(settings.model, resolved.path)
    if not settings.served_model_name:
        return resolved
    return ResolvedModel(resolved.path, settings.served_model_name, resolved.revision)


def _resolve(settings: EngineSettings, progress: Progress) -> ResolvedModel:
    model, path = settings.model, Path(settings.model).expanduser()
    if model == "embedded":
        return ResolvedModel(prepare_embedded_model(settings.models_dir, progress), NAME)
    if model and path.is_dir():
        return ResolvedModel(path, path.resolve().name)
    if path.suffix == ".gguf":
        return ResolvedModel(prepare_gguf_model(path, settings.models_dir, progress), path.stem)
    # A name with at most one slash may be a hub id; anything else was meant as a path.
    if path.is_file() or not _HUB_ID.fullmatch(model):
        raise StartupError(f"--model {model}: no such directory, and neither a .gguf file nor a Hugging Face id")
    return _download(model, settings.revision, progress)


def _download(model: str, revision: str, progress: Progress) -> ResolvedModel:
    # Imported here: only models of the hub need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    progress(f"fetching {model} from the Hugging Face hub")
    try:
        path = snapshot_download(
            model,
            revision=revision or None,
            allow_patterns=_HUB_FILES,
            ignore_patterns=["*/*", "consolidated*"],
            library_name="stepwire",
        )
    except GatedRepoError as error:
        raise StartupError(f"--model {model}: access is gated; ask for it on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise StartupError(f"--revision {revision}: {model} has no such revision") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise StartupError(f"--model {model}: no such local path, and the hub has no such model") from error
    except OSError as error:
        # No network, a proxy that refuses, a full disk: the hub's errors are OSErrors.
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise StartupError(
            f"--model {model}: no such local path, and it can not be fetched from the hub ({first_line})"
        ) from error
    return ResolvedModel(Path(path), model, Path(path).name)


def _require_loadable(model: str, path: Path) -> None:
    if not (path / "config.json").is_file():
        raise StartupError(f"--model {model}: {path} has no config.json")
    if not any(path.glob("*.safetensors")):
        raise StartupError(f"--model {model}: {path} has no .safetensors weights")
