"""Rows by client class. The label has the names of the operator's token file, and OTHER for whatever callers claim.

Owner: the event loop. A class that has left the file keeps its series: counters never go, and its requests still end.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from stepwire.grpc_errors import REASONS
from stepwire.metric_rows import counter, gauge

# Callers without a class, or with one that no token has.
OTHER = "other"

IN_FLIGHT = gauge("stepwire_frontend_requests_in_flight", "Requests being served.", ("client_class",))
REJECTED = counter(
    "stepwire_frontend_requests_rejected_total",
    "Requests refused before they generated anything, by reason.",
    ("reason", "client_class"),
)
ROWS = (IN_FLIGHT, REJECTED)


class ClassMetrics:
    """The series of one client class."""

    def __init__(self, classes: ClientClassMetrics, name: str) -> None:
        self.in_flight = classes.in_flight.labels(name)
        self.rejected = {reason: classes.rejected.labels(reason, name) for reason in REASONS}


class ClientClassMetrics:
    """The series of all client classes, each from the moment the operator names it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.in_flight = IN_FLIGHT.gauge(registry)
        self.rejected = REJECTED.counter(registry)
        self._other = ClassMetrics(self, OTHER)
        self._named = {OTHER: self._other}

    def name(self, client_classes: Iterable[str]) -> None:
        """Those that the operator knows now."""
        for one in client_classes:
            if one not in self._named:
                self._named[one] = ClassMetrics(self, one)

    def of(self, client_class: str) -> ClassMetrics:
        """Keep it for as long as the request lives: meanwhile the operator may name its class."""
        return self._named.get(client_class, self._other)
