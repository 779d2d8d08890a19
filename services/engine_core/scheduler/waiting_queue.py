"""Requests that could be admitted, in the order of the scheduling policy; preempted ones apart from new ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine_core.scheduler.client_classes import ClientClasses
from engine_core.scheduler.fair_order import FairOrder
from engine_core.scheduler.fair_places import FairPlaces
from engine_core.scheduler.priority_order import PriorityOrder
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_queue import RequestQueue
from engine_core.scheduler.scheduling_policy import SchedulingPolicy
from engine_core.scheduler.service_order import KeyOrder, ServiceOrder


class WaitingQueue(RequestQueue):
    """Among equal priorities, what was scheduled before goes before what never was: its caller has seen it begin.

    A pause may hold back new requests and let preempted ones go on; that is why `peek` can be asked for those alone.
    """

    def __init__(self, policy: SchedulingPolicy, classes: ClientClasses, max_num_seqs: int = 0) -> None:
        super().__init__()
        self._policy = policy
        self._classes = classes
        self._preempted = KeyOrder(policy.order)
        self._places = FairPlaces(max_num_seqs, classes)
        self._fair = FairOrder(classes) if policy is SchedulingPolicy.FAIR else None
        self._new: ServiceOrder = self._fair if self._fair is not None else _order_of_new(policy, classes)
        self._num_appended = 0

    def __iter__(self) -> Iterator[Request]:
        """In the order of service, as far as classes do not take turns. Sorts: never in a step."""
        order = self._policy.order
        return iter(
            sorted(super().__iter__(), key=lambda one: (one.priority, not one.was_scheduled, *order(one))),
        )

    @property
    def has_preempted(self) -> bool:
        return bool(len(self._preempted))

    def append(self, request: Request) -> None:
        """A new request: its number and its effective priority are fixed now."""
        self._num_appended += 1
        request.order = self._num_appended
        # The other policies have one priority.
        is_ranked = self._policy is SchedulingPolicy.PRIORITY
        request.priority = self._classes.capped_priority(request.fairness_key, request.priority) if is_ranked else 0
        self._places.note(request)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """A request that was preempted, or waited aside: it goes where its order puts it."""
        super().append(request)
        self._order_of(request).append(request)

    def peek(
        self, running: Sequence[Request] = (), now: float = 0.0, *, only_preempted: bool = False
    ) -> Request | None:
        """Who is admitted next to those that run; None when nobody may be."""
        preempted = self._preempted.peek()
        new = None if only_preempted else self._peek_new(running, now)
        if preempted is None or (new is not None and new.priority < preempted.priority):
            return new
        return preempted

    def _peek_new(self, running: Sequence[Request], now: float) -> Request | None:
        new = self._new.peek()
        if new is None or self._fair is None or self._places.are_open(running):
            return new
        full = self._places.full_classes(running, self._fair.classes, now)
        return new if new.fairness_key not in full else self._fair.peek_beside(full)

    def take(self, request: Request) -> None:
        """The request that `peek` returned is admitted."""
        super().remove(request)
        self._order_of(request).take(request)

    def remove(self, request: Request) -> None:
        """It leaves unserved, from any place."""
        super().remove(request)
        self._order_of(request).remove(request)

    def _order_of(self, request: Request) -> ServiceOrder:
        return self._preempted if request.was_scheduled else self._new


def _order_of_new(policy: SchedulingPolicy, classes: ClientClasses) -> ServiceOrder:
    return PriorityOrder(classes) if policy is SchedulingPolicy.PRIORITY else KeyOrder(policy.order)
