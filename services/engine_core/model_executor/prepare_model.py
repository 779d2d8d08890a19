"""Command `python -m engine_core.model_executor.prepare_model`: fetch and convert the model before the first start.

Takes the flags of the engine. Runs alone, without an engine; never loads the model for serving.
"""

from __future__ import annotations

from rich.console import Console

from engine_core.config import EngineSettings
from engine_core.model_executor.model_source import resolve_model
from engine_core.model_executor.startup_error import StartupError


def main() -> None:
    """Resolve --model with a spinner; exit 1 with one sentence when that fails."""
    settings = EngineSettings.from_command_line()
    console = Console(stderr=True)
    try:
        with console.status(f"preparing {settings.model}") as status:
            resolved = resolve_model(settings, lambda message: status.update(message))
    except StartupError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        raise SystemExit(1) from None
    console.print(f"{resolved.name} is ready in {resolved.path}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
