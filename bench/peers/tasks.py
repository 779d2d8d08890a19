"""What every contestant is asked to answer, as token ids in a file that all of them read. Standard library only.

Drivers inside other engines' environments import this module too.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

# For all concurrencies of a round.
NUM_SHORT = 320
NUM_SHARING = 16
SHORT_LEN, LONG_LEN, SHARED_LEN, OWN_LEN = 64, 1024, 800, 32
# Each has prompts of its own, which no prefix cache has seen.
MAX_ROUNDS = 10
_TOKEN_IDS = range(1000, 49_000)


@dataclass(frozen=True, slots=True)
class Task:
    """`count` prompts of a kind at once, from prompt `first` on; so often the same again."""

    kind: str
    first: int
    count: int
    max_tokens: int
    repetitions: int = 1

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        return cls(**json.loads(line))

    def prompts(self, file: Path) -> list[list[int]]:
        found = json.loads(file.read_text(encoding="utf-8"))[self.kind]
        prompts = [found["shared"] + own for own in found["own"]] if isinstance(found, dict) else found
        return prompts[self.first : self.first + self.count]


def write_prompts(file: Path) -> None:
    """Random ids, equal in every run: what an engine computes does not depend on them."""
    rng = random.Random(0)

    def draw(length: int) -> list[int]:
        return rng.choices(_TOKEN_IDS, k=length)

    content: dict[str, object] = {"warm": [draw(SHORT_LEN) for _ in range(8)]}
    for number in range(MAX_ROUNDS):
        content[f"short-{number}"] = [draw(SHORT_LEN) for _ in range(NUM_SHORT)]
        content[f"long-{number}"] = [draw(LONG_LEN)]
        content[f"prefix-{number}"] = {"shared": draw(SHARED_LEN), "own": [draw(OWN_LEN) for _ in range(NUM_SHARING)]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
