"""Orders in which waiting requests are served: the interface, and the plain order by one key of each request.

`priority_order` and `fair_order` are the others. Whoever is next stays next until it is taken, removed, or overtaken by
a request that comes later and sorts before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine_core.scheduler.lazy_heap import LazyHeap, Order
from engine_core.scheduler.request import Request, RequestKey


class ServiceOrder(Protocol):
    """Holds requests. Every method but `__len__` may cost O(log n)."""

    def __len__(self) -> int: ...

    def append(self, request: Request) -> None: ...

    def peek(self) -> Request | None:
        """Who is served next; None when nobody waits."""

    def take(self, request: Request) -> None:
        """The next one is served: it leaves, and counts where counting matters."""

    def remove(self, request: Request) -> None:
        """A request leaves from any place, unserved. Raises KeyError for a stranger."""


class KeyOrder:
    """Least key first. The key of a request must not change while it waits."""

    def __init__(self, key: Callable[[Request], Order]) -> None:
        self._key = key
        self._requests: LazyHeap[RequestKey, Request] = LazyHeap()

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, request: Request) -> None:
        self._requests.put(request.key, self._key(request), request)

    def peek(self) -> Request | None:
        return self._requests.first()

    def take(self, request: Request) -> None:
        self._requests.remove(request.key)

    def remove(self, request: Request) -> None:
        self._requests.remove(request.key)
