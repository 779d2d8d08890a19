"""What engine and worker send each other through the worker's pipe, pickled: both run the same code on one host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_core.config import EngineSettings
from engine_core.model_executor.parallel.place import Place

# The answer to WorkerStart has this id.
START_CALL = 0


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """First message of the engine. Answered with the ModelInfo of the worker's part once it is loaded."""

    settings: EngineSettings
    model_path: Path
    place: Place
    # A file by which the workers find each other.
    rendezvous: Path


@dataclass(frozen=True, slots=True)
class Command:
    """A call of the worker's executor. Without an id there is no answer, and a failure is the end of the engine."""

    call_id: int | None
    # A method of InProcessExecutor.
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Last message of the engine: release everything and exit."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned."""

    call_id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """What a call raised, as words: an exception need not survive pickling."""

    call_id: int | None
    cause_type: str
    message: str
