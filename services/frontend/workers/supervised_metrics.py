"""The metrics of a frontend of several workers, as one scrape sees them: the supervisor's own, and the workers' sum."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, disable_created_metrics
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from frontend.metrics.frontend_metrics import ROWS
from frontend.metrics.workers import LISTENING, RESTARTS
from frontend.workers.metrics_sum import Snapshot, add_up, cumulative_part, take_snapshot
from frontend.workers.worker_handle import WorkerHandle
from stepwire.metric_aliases import AliasedRegistry, Collects

# Longer than a worker is waited for.
COLLECT_TIMEOUT_S = 5.0


class SupervisedMetrics(Collector):
    """Its registry is what is scraped. A scrape asks every worker, in the event loop, and waits in its own thread."""

    def __init__(self, workers: Mapping[int, WorkerHandle], loop: asyncio.AbstractEventLoop) -> None:
        self._workers = workers
        self._loop = loop
        # What workers that are gone have counted, up to the last scrape that each has answered.
        self._of_the_gone: Snapshot = []
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the package leaves it untyped
        self._own = CollectorRegistry()
        ProcessCollector(registry=self._own)
        GCCollector(registry=self._own)
        listening = LISTENING.gauge(self._own)
        listening.set_function(lambda: sum(worker.is_listening for worker in self._workers.values()))
        self.restarts = RESTARTS.counter(self._own)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def served(self, alias: str) -> Collects:
        """What a scrape gets; `alias` is the setting."""
        return self.registry if alias == "none" else AliasedRegistry(self.registry, ROWS)

    def collect(self) -> Iterable[Metric]:
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(COLLECT_TIMEOUT_S)

    def retire(self, worker: WorkerHandle) -> None:
        """It is gone; called before it leaves the mapping."""
        self._of_the_gone = take_snapshot(add_up([self._of_the_gone, cumulative_part(worker.snapshot)]))

    async def _collect(self) -> list[Metric]:
        # Both before the first await: a worker that dies meanwhile counts once.
        gone, workers = self._of_the_gone, list(self._workers.values())
        snapshots = await asyncio.gather(*(worker.fetch_snapshot() for worker in workers))
        return add_up([gone, *snapshots, take_snapshot(self._own.collect())])
