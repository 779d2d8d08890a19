"""What the model's own files say about generation: end-of-sequence ids and sampling defaults.

Runs once at start-up; never on the event loop of a serving process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for sampling fields a request leaves unset; `top_k` 0 = off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


# The same ranges as for requests: a bad default must not be blamed on a caller who never named the field.
_RANGES: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= -1 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: value > 0,
}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or an empty one when there is no file. Raises ValueError for anything else in it."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def read_defaults(directory: Path) -> GenerationDefaults:
    """Sampling defaults of generation_config.json; raises ValueError for a value that no request could ask for."""
    path = directory / "generation_config.json"
    config = read_json(path)
    found: dict[str, Any] = {}
    for field in fields(GenerationDefaults):
        value = config.get(field.name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{path}: {field.name} is {value!r}, not a finite number")
        if not _RANGES[field.name](value):
            raise ValueError(f"{path}: {field.name} is {value!r}, which is outside its range")
        found[field.name] = max(int(value), 0) if field.name == "top_k" else float(value)
    return GenerationDefaults(**found)


def read_eos_token_ids(directory: Path, token_to_id: Callable[[str], int | None]) -> tuple[int, ...]:
    """Every id that ends a sequence: those of both configs and the tokenizer's eos token, sorted."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        ids.update(_as_ids(read_json(directory / name).get("eos_token_id")))
    token = read_json(directory / "tokenizer_config.json").get("eos_token")
    # Older tokenizers write the token as an object with its text in `content`.
    text = token.get("content") if isinstance(token, dict) else token
    token_id = token_to_id(text) if isinstance(text, str) else None
    if token_id is not None:
        ids.add(token_id)
    return tuple(sorted(ids))


def _as_ids(value: object) -> Iterator[int]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            yield item
