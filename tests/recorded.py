"""What a Prometheus has recorded of processes, the dead among them: sums to compare with the counts of others.

Of a process that is gone the last sample counts. What came after its last scrape nobody knows; so that a sum is exact
over its death, let it be idle, and call `catch_up`, before it dies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from running_prometheus import RunningPrometheus, wait_until
from running_stack import Service

# Longer than any test.
_EVER = "1h"


class Recorded:
    """Every process must have a metrics port of its own, those that follow others too: a port is an `instance`."""

    def __init__(self, server: RunningPrometheus) -> None:
        self._server = server
        self._ports: list[int] = []

    def watch(self, frontends: Iterable[Service], engines: Iterable[Service]) -> None:
        """These are scraped from now on, and nothing else."""
        groups = [[service.metrics_port for service in group] for group in (frontends, engines)]
        self._server.scrape(*groups)
        self._ports = [port for group in groups for port in group]

    def catch_up(self) -> None:
        """Return when each has been scraped once more, from its beginning to its end."""
        since = time.time()
        expected = {f"127.0.0.1:{port}" for port in self._ports}
        wait_until(lambda: self._scraped_after(since) >= expected, "all are scraped")

    def total(self, name: str, **labels: str) -> float:
        matchers = ",".join(f'{label}="{value}"' for label, value in labels.items())
        found = self._server.vector(f"sum(last_over_time({name}{{{matchers}}}[{_EVER}]))")
        assert found, f"no series {name} {labels}"
        return found[0][1]

    def by(self, name: str, label: str) -> dict[str, float]:
        found = self._server.vector(f"sum by ({label}) (last_over_time({name}[{_EVER}]))")
        return {labels[label]: value for labels, value in found if value}

    def now(self, name: str) -> float:
        """Sum over the living."""
        found = self._server.vector(f"sum({name})")
        assert found, f"no series {name}"
        return found[0][1]

    def _scraped_after(self, since: float) -> set[str]:
        # Of a comparison, `timestamp` would be the time of the question.
        found = self._server.vector("timestamp(up) and up == 1")
        return {labels["instance"] for labels, scraped in found if scraped > since}
