"""Fairness between client classes of one priority: served tokens in proportion to the weights of those who wait.

Self-clocked fair queueing. Virtual time counts tokens per weight; the head of a class is due its tokens divided by the
class's weight after its turn began, and whoever is due first is served and sets the clock. A class that comes anew
begins at the clock, never before: neither staying away nor a fresh name earns anything, and no class gets ahead of one
that waits by more than the largest request of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.lazy_heap import LazyHeap, Order
from engine_core.scheduler.request import Request
from engine_core.scheduler.service_order import KeyOrder


def by_arrival(request: Request) -> Order:
    return (request.arrival_time, request.order)


@dataclass(slots=True)
class _WaitingClass:
    """The requests of one class, and the virtual time at which its present turn began."""

    requests: KeyOrder
    weight: int
    turn_began: float

    def due(self, request: Request) -> float:
        return self.turn_began + request.num_tokens / self.weight


class FairOrder:
    """A ServiceOrder. Within a class by arrival; a class that nobody waits for any more is forgotten."""

    def __init__(self, classes: ClientClasses) -> None:
        self._client_classes = classes
        # By when the head of each is due.
        self._waiting: LazyHeap[str, _WaitingClass] = LazyHeap()
        self._clock = 0.0
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def append(self, request: Request) -> None:
        name = request.fairness_key
        waiting = self._waiting.get(name)
        if waiting is None:
            waiting = _WaitingClass(KeyOrder(by_arrival), self._client_classes.weight(name), self._clock)
        waiting.requests.append(request)
        self._num_requests += 1
        self._place(name, waiting)

    def peek(self) -> Request | None:
        waiting = self._waiting.first()
        return None if waiting is None else waiting.requests.peek()

    @property
    def classes(self) -> list[str]:
        """Those that wait."""
        return [name for name, _ in self._waiting.items()]

    def peek_beside(self, full: frozenset[str]) -> Request | None:
        """Who is served next of all but these classes. O(classes)."""
        heads = [waiting.requests.peek() for name, waiting in self._waiting.items() if name not in full]
        return min((head for head in heads if head is not None), key=self._due, default=None)

    def take(self, request: Request) -> None:
        waiting = self._class_of(request)
        if self.peek() is not request:
            self._forgo(waiting.due(request), waiting.turn_began)
        waiting.turn_began = waiting.due(request)
        # A class that was owed more than it now asks for may be due before the clock, which never goes back.
        self._clock = max(self._clock, waiting.turn_began)
        self._leave(request, waiting)

    def remove(self, request: Request) -> None:
        self._leave(request, self._class_of(request))

    def _forgo(self, due: float, began: float) -> None:
        """Classes that were passed over had their part already: as if they came with the turn that is served now."""
        for name, waiting in self._waiting.items():
            head = waiting.requests.peek()
            if head is not None and waiting.turn_began < began and waiting.due(head) < due:
                waiting.turn_began = began
                self._place(name, waiting)

    def _due(self, request: Request) -> Order:
        return (self._class_of(request).due(request), *by_arrival(request))

    def _class_of(self, request: Request) -> _WaitingClass:
        waiting = self._waiting.get(request.fairness_key)
        if waiting is None:
            raise KeyError(request.key)
        return waiting

    def _leave(self, request: Request, waiting: _WaitingClass) -> None:
        waiting.requests.remove(request)
        self._num_requests -= 1
        self._place(request.fairness_key, waiting)

    def _place(self, name: str, waiting: _WaitingClass) -> None:
        """Where the class stands now, after any change to it."""
        head = waiting.requests.peek()
        if head is None:
            self._waiting.remove(name)
        else:
            self._waiting.put(name, (waiting.due(head), *by_arrival(head)), waiting)
