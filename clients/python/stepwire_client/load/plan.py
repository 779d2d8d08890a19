"""One run of `stepwire bench`: warm up, then measure each load so often as asked.

Owner: the event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import islice

from stepwire_client.load.loops import LoadResult, closed_loop, open_loop
from stepwire_client.load.reply import RequestFailed, Target
from stepwire_client.load.workload import LoadRequest

DEFAULT_OPEN_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """How to send: so many at once or, where that is 0, so many a second."""

    concurrency: int = 0
    rate: float = 0.0

    def num_requests(self, asked: int) -> int:
        return asked or self.concurrency or DEFAULT_OPEN_REQUESTS

    async def run(self, target: Target, requests: list[LoadRequest], seed: int) -> LoadResult:
        if self.concurrency:
            return await closed_loop(target, requests, self.concurrency)
        return await open_loop(target, requests, self.rate, seed)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send. Both sources of requests are endless."""

    loads: list[Load]
    requests: Iterator[LoadRequest]
    warm_up: list[LoadRequest]
    # Of each measurement; 0 = the load's own default.
    num_requests: int
    repetitions: int
    # Every repetition of a load sends the same, so that later ones find it in the prefix cache.
    repeats_requests: bool
    seed: int


async def run(plan: Plan, target: Target) -> AsyncIterator[tuple[Load, int, LoadResult]]:
    """Each measurement as it ends, with its load and repetition. Raises RequestFailed when the warm-up fails."""
    if plan.warm_up:
        _check(await closed_loop(target, plan.warm_up, len(plan.warm_up)))
    for load in plan.loads:
        requests: list[LoadRequest] = []
        for repetition in range(plan.repetitions):
            if not (requests and plan.repeats_requests):
                requests = list(islice(plan.requests, load.num_requests(plan.num_requests)))
            # Repetitions of an open loop are samples of one load, not one arrival pattern again and again.
            yield load, repetition, await load.run(target, requests, plan.seed + repetition)


def _check(warm_up: LoadResult) -> None:
    for reply in warm_up.replies:
        if reply.failure:
            raise RequestFailed(reply.failure, reply.failure_message)
