"""Who contends for the frontend's limits, and how much each client class holds of them. Owner: the event loop.

Without waiting there is no line in which a class could come first. Instead a last part of the limits is kept back for
classes that hold less than their fair part, so that whoever floods finds the door closed before the others do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

# A class that has asked within this time contends: it comes back for what it was refused.
RECENT_S = 60.0
# Names are the callers' to choose; so many are remembered.
MAX_RECENT = 1000


@dataclass(frozen=True, slots=True)
class Held:
    """An amount of what is limited."""

    num_requests: int = 0
    num_prompt_tokens: int = 0

    def __add__(self, other: Held) -> Held:
        return Held(self.num_requests + other.num_requests, self.num_prompt_tokens + other.num_prompt_tokens)

    def __sub__(self, other: Held) -> Held:
        return Held(self.num_requests - other.num_requests, self.num_prompt_tokens - other.num_prompt_tokens)

    def times(self, share: float) -> Held:
        """That share of it, but room for one request at least."""
        return Held(max(1, int(self.num_requests * share)), max(1, int(self.num_prompt_tokens * share)))

    def divided_by(self, number: int) -> Held:
        return Held(self.num_requests // number, self.num_prompt_tokens // number)

    def fits(self, limits: Held) -> bool:
        return self.num_requests <= limits.num_requests and self.num_prompt_tokens <= limits.num_prompt_tokens


def kept_back(limit: int) -> int:
    """How much of a limit is for classes with less than their fair part: an eighth."""
    return limit // 8


class Contenders:
    """The client classes that hold something, have asked lately, or are known to the operator."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.named: frozenset[str] = frozenset()
        self._clock = clock
        self._held: dict[str, Held] = {}
        # When each asked last, the latest at the end.
        self._asked: OrderedDict[str, float] = OrderedDict()

    def note(self, client_class: str) -> None:
        """It asks now."""
        self._asked[client_class] = self._clock()
        self._asked.move_to_end(client_class)
        if len(self._asked) > MAX_RECENT:
            self._asked.popitem(last=False)

    def change(self, client_class: str, more: Held) -> None:
        """It holds so much more, or less."""
        held = self._held.get(client_class, Held()) + more
        if held == Held():
            self._held.pop(client_class, None)
        else:
            self._held[client_class] = held

    def held_by(self, client_class: str) -> Held:
        return self._held.get(client_class, Held())

    def count(self, client_class: str) -> int:
        """How many contend, this one among them."""
        oldest = self._clock() - RECENT_S
        while self._asked and next(iter(self._asked.values())) < oldest:
            self._asked.popitem(last=False)
        return len({client_class, *self._held, *self._asked, *self.named})
