"""Which client classes may not take one more place among the running requests. Pure; time is given.

Turns in the line do not help a class whose requests find every place taken by a flood that came before. So of the last
places no class takes more than its part while others contend: those that run something, wait, or have asked lately.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.request import Request

# A class that has asked within this time contends: its next request may come at any moment.
RECENT_S = 60.0
# Names are the callers' to choose; so many are remembered.
MAX_RECENT = 1000
# One in so many places is kept back.
KEPT_BACK = 8


class FairPlaces:
    """Sees every request that is queued; `max_num_seqs` = how many may run."""

    def __init__(self, max_num_seqs: int, classes: ClientClasses) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_open = max_num_seqs - max_num_seqs // KEPT_BACK
        self._classes = classes
        # When each class asked last, the latest at the end.
        self._asked: OrderedDict[str, float] = OrderedDict()

    def note(self, request: Request) -> None:
        """It is queued."""
        self._asked[request.fairness_key] = max(request.arrival_time, next(reversed(self._asked.values()), 0.0))
        self._asked.move_to_end(request.fairness_key)
        self._forget(request.arrival_time)

    def _forget(self, now: float) -> None:
        asked = self._asked
        while len(asked) > MAX_RECENT or (asked and next(iter(asked.values())) < now - RECENT_S):
            asked.popitem(last=False)

    def are_open(self, running: Sequence[Request]) -> bool:
        """Whether there are places enough for everybody."""
        return len(running) < self._num_open

    def full_classes(self, running: Sequence[Request], waiting: Iterable[str], now: float) -> frozenset[str]:
        """Those that may not take one of the last places at `now`."""
        self._forget(now)
        held = Counter(request.fairness_key for request in running)
        weights = {name: self._classes.weight(name) for name in {*held, *self._asked, *waiting}}
        total = sum(weights.values())
        return frozenset(name for name, count in held.items() if count * total >= self._max_num_seqs * weights[name])
