"""Which engine gets the next request. Pure: sees what the engines have reported and what was sent there since."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from frontend.engine_client.engine_facts import EngineLoad

# A request that waits costs its whole prefill, one that runs a token of each step.
WAITING_WEIGHT = 4


class PickReason(enum.Enum):
    """Why an engine got a request."""

    LOAD = "load"
    PINNED = "pinned"
    # Another engine did not take it.
    RETRY = "retry"


class Candidate(NamedTuple):
    """An engine that takes requests."""

    load: EngineLoad
    # Requests of this frontend that `load` does not count yet.
    num_unreported: int


class Balancer(Protocol):
    """One way to spread requests."""

    def pick(self, candidates: Sequence[Candidate]) -> int:
        """Index of the engine for the next request; there is at least one candidate."""


class LeastLoaded:
    """The lowest score wins, and the next in turn among equals; `start` differs between the frontends."""

    def __init__(self, start: int) -> None:
        self._turn = start

    def pick(self, candidates: Sequence[Candidate]) -> int:
        self._turn += 1
        order = [(self._turn + offset) % len(candidates) for offset in range(len(candidates))]
        return min(order, key=lambda index: score(candidates[index]))


def score(candidate: Candidate) -> int:
    """Load of an engine as of now.

    Every frontend has the same reports and decides alike, so that for each request this one has sent since, the others
    have sent one as well.
    """
    load = candidate.load
    return WAITING_WEIGHT * (load.waiting + load.num_frontends * candidate.num_unreported) + load.running
