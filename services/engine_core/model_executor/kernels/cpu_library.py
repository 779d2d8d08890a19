"""The compiled CPU kernels as torch operators of this process, with fake kernels for tensors without memory.

Owner: the thread that starts the engine. A library is loaded once and stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine_core.model_executor.kernels.cpu_build import INSTRUCTION_SETS, BuildError, build

_OPERATORS = ("add_rms_norm", "rope_and_cache", "act_mul", "paged_attention")
_lock = threading.Lock()


def load_operators(progress: Callable[[str], None], *, is_debug: bool = False, cache_dir: Path | None = None) -> Any:
    """The namespace of the operators, `torch.ops.stepwire`; or `stepwire_debug`, which checks what it reads."""
    name = "stepwire_debug" if is_debug else "stepwire"
    with _lock:
        operators = getattr(torch.ops, name)
        if not hasattr(operators, "paged_attention"):
            library = build(progress, is_debug=is_debug, cache_dir=cache_dir)
            try:
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]  # torch annotates no arguments here
            except OSError as error:
                raise BuildError(f"{library} can not be loaded: {error}") from error
            for operator in _OPERATORS:
                # These write into what they are given, so that there is no shape to tell.
                torch.library.register_fake(f"{name}::{operator}", _nothing)
            for operator in ("multiply_packed", "multiply_int8"):
                torch.library.register_fake(f"{name}::{operator}", _product)
    return operators


def available_sets(operators: Any) -> tuple[str, ...]:
    """The instruction sets that this machine has, best first."""
    return tuple(name for number, name in enumerate(INSTRUCTION_SETS) if operators.has_instruction_set(number))


def _product(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """The number of columns is the last argument but one."""
    return x.new_empty(x.shape[0], arguments[-2])


def _nothing(*_: object) -> None:
    pass
