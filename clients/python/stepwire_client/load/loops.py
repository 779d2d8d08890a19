"""Sends requests at a fixed concurrency (closed loop) or at random times of a fixed rate (open loop).

Owner: the event loop. A failed request is noted and stops no other one.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from itertools import accumulate, chain

from stepwire_client.load.reply import Reply, RequestFailed, Target
from stepwire_client.load.workload import LoadRequest


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All replies, and from when to when the load ran (Unix times; the difference is of the monotonic clock)."""

    replies: list[Reply]
    wall_s: float
    started_at: float


async def closed_loop(target: Target, requests: list[LoadRequest], concurrency: int) -> LoadResult:
    """So many at once: the next begins when one ends, so that a slow server gets less load."""
    # All senders take from it.
    waiting = iter(requests)
    started, started_at = time.perf_counter(), time.time()

    async def send_one_after_the_other() -> list[Reply]:
        return [await _send(target, request, time.perf_counter()) for request in waiting]

    shares = await asyncio.gather(*(send_one_after_the_other() for _ in range(min(concurrency, len(requests)))))
    return LoadResult(list(chain(*shares)), time.perf_counter() - started, started_at)


async def open_loop(target: Target, requests: list[LoadRequest], rate: float, seed: int) -> LoadResult:
    """So many a second on average, at the times of a Poisson process, whatever the server does."""
    started, started_at = time.perf_counter(), time.time()

    async def send_at(request: LoadRequest, due: float) -> Reply:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await _send(target, request, due)

    due_times = arrival_times(len(requests), rate, seed)
    sends = (send_at(request, started + due) for request, due in zip(requests, due_times, strict=True))
    replies = await asyncio.gather(*sends)
    return LoadResult(list(replies), time.perf_counter() - started, started_at)


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start, ascending; equal seeds give equal times."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(count)))


async def _send(target: Target, request: LoadRequest, started: float) -> Reply:
    reply = Reply(started)
    try:
        await target.complete(request, reply)
        if not (reply.num_tokens and reply.chunk_times):
            raise RequestFailed("NO_TOKENS", "the answer holds no token")
    except RequestFailed as failure:
        reply.failure, reply.failure_message = failure.reason, str(failure)
    reply.ended = time.perf_counter()
    return reply
