"""scenarios.yaml as the tests see it: what is called, and what must come of it. Its head explains the words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "scenarios.yaml"
OPTIONS = ("timeout_ms", "cancel_after_messages", "metadata", "resume")


@dataclass(frozen=True)
class Step:
    """One call. `held` is made by the test itself and stays open until the scenario ends."""

    method: str
    request: Mapping[str, Any]
    expect: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    save: str = ""
    continues: str = ""
    held: bool = False


@dataclass(frozen=True)
class Scenario:
    """Calls of one client, one after the other."""

    name: str
    steps: tuple[Step, ...]


def load(path: Path = FILE) -> list[Scenario]:
    """Every scenario of a file; a word that is unknown is an error."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Scenario(one["name"], tuple(_step(step) for step in one["calls"])) for one in document["scenarios"]]


def _step(fields: Mapping[str, Any]) -> Step:
    options = {key: value for key, value in fields.items() if key in OPTIONS}
    rest = {key: value for key, value in fields.items() if key not in OPTIONS}
    rest["request"] = expand(rest.get("request", {}))
    rest.setdefault("expect", {})
    return Step(options=options, **rest)


def expand(value: Any) -> Any:
    """The value with each `{repeat: [what, times]}` in it written out."""
    if isinstance(value, dict):
        if set(value) == {"repeat"}:
            what, times = value["repeat"]
            return what * times
        return {key: expand(part) for key, part in value.items()}
    return [expand(part) for part in value] if isinstance(value, list) else value
