"""Lower priorities first, and fairness between client classes within each."""

from __future__ import annotations

from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.fair_order import FairOrder
from engine_core.scheduler.lazy_heap import LazyHeap
from engine_core.scheduler.request import Request


class PriorityOrder:
    """A ServiceOrder of one FairOrder for each priority that somebody waits with."""

    def __init__(self, classes: ClientClasses) -> None:
        self._classes = classes
        self._levels: LazyHeap[int, FairOrder] = LazyHeap()
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def append(self, request: Request) -> None:
        level = self._levels.get(request.priority)
        if level is None:
            level = FairOrder(self._classes)
            self._levels.put(request.priority, (request.priority,), level)
        level.append(request)
        self._num_requests += 1

    def peek(self) -> Request | None:
        level = self._levels.first()
        return None if level is None else level.peek()

    def take(self, request: Request) -> None:
        level = self._level_of(request)
        level.take(request)
        self._left(request, level)

    def remove(self, request: Request) -> None:
        level = self._level_of(request)
        level.remove(request)
        self._left(request, level)

    def _level_of(self, request: Request) -> FairOrder:
        level = self._levels.get(request.priority)
        if level is None:
            raise KeyError(request.key)
        return level

    def _left(self, request: Request, level: FairOrder) -> None:
        self._num_requests -= 1
        if not len(level):
            self._levels.remove(request.priority)
