"""What the operator grants each class of callers: its weight, and the best priority it may ask for. Pure, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Every class that is not named.
ANY_CLASS = "*"


@dataclass(frozen=True, slots=True)
class ClientClasses:
    """By name of the class; `ANY_CLASS` holds for all others. Without it their weight is 1 and they have no cap."""

    weights: Mapping[str, int] = field(default_factory=dict)
    best_priorities: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if weight < 1:
                raise ValueError(f"the weight of client class {name!r} is {weight}; at least 1 is needed")

    def weight(self, name: str) -> int:
        return self.weights.get(name, self.weights.get(ANY_CLASS, 1))

    def capped_priority(self, name: str, priority: int) -> int:
        """The priority that a request of this class gets for the one it asks for; lower is better."""
        best = self.best_priorities.get(name, self.best_priorities.get(ANY_CLASS, priority))
        return max(priority, best)
