"""What workers ask of each other, answered in the supervisor. Owner: its event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import astuple
from functools import partial
from typing import Any

from frontend.peers import NO_DRAIN, DrainStatus
from frontend.workers.control_channel import ChannelClosedError, Handler
from frontend.workers.request_ids import RequestIds, RequestKey
from frontend.workers.worker_handle import WorkerHandle


class Relay:
    """`workers` are the living ones by number; the supervisor changes the mapping."""

    def __init__(self, workers: Mapping[int, WorkerHandle]) -> None:
        self._workers = workers
        self._ids = RequestIds()
        # Claims that wait for what another worker says, by who asks. A release ends its claim as well.
        self._claims: dict[tuple[int, RequestKey], object] = {}
        # What an operator has asked for holds for workers that come later, too.
        self._drain: dict[str, Any] | None = None

    def handlers(self, asker: int) -> dict[str, Handler]:
        """For the messages of this worker."""
        names = ("claim", "release", "abort", "drain", "drain_status", "set_log_level")
        return {name: partial(getattr(self, name), asker) for name in names}

    def welcome(self, worker: WorkerHandle) -> None:
        """A worker listens: it may have to drain at once."""
        if self._drain is not None:
            worker.channel.tell("drain", **self._drain)

    def forget(self, number: int) -> None:
        """The worker is gone."""
        self._claims = {(asker, key): claim for (asker, key), claim in self._claims.items() if asker != number}
        self._ids.forget(number)

    async def claim(self, asker: int, caller: str, request_id: str) -> int | None:
        """None, or the tokens that another worker has emitted of a request with this id."""
        key = (caller, request_id)
        claim = self._claims[asker, key] = object()
        try:
            while (owner := self._ids.claim(asker, key)) != asker:
                tokens_emitted: int | None = await self._call(
                    owner, "tokens_emitted", caller=caller, request_id=request_id
                )
                if tokens_emitted is not None:
                    return tokens_emitted
                # It has ended meanwhile.
                self._ids.release(owner, key)
                if self._claims.get((asker, key)) is not claim:
                    # So has the one that asks: its id would be nobody's, and for ever.
                    return None
            return None
        finally:
            if self._claims.get((asker, key)) is claim:
                del self._claims[asker, key]

    async def release(self, asker: int, caller: str, request_id: str) -> None:
        key = (caller, request_id)
        self._claims.pop((asker, key), None)
        self._ids.release(asker, key)

    async def abort(self, asker: int, caller: str, request_ids: list[str]) -> list[str]:
        by_owner = self._ids.by_owner(caller, request_ids, asker)
        calls = (self._call(owner, "abort", caller=caller, request_ids=ids) for owner, ids in by_owner.items())
        return [request_id for live in await asyncio.gather(*calls) for request_id in live or ()]

    async def drain(self, asker: int, timeout_s: float | None, reason: str) -> Any:
        self._drain = {"timeout_s": timeout_s, "reason": reason}
        return await self._sum_of_others(asker, "drain", **self._drain)

    async def drain_status(self, asker: int) -> Any:
        return await self._sum_of_others(asker, "drain_status")

    async def set_log_level(self, asker: int, level: str, logger: str) -> None:
        logging.getLogger(logger or None).setLevel(level)
        await self._call_others(asker, "set_log_level", level=level, logger=logger)

    async def _sum_of_others(self, asker: int, name: str, **arguments: Any) -> Any:
        answers = await self._call_others(asker, name, **arguments)
        return astuple(sum((DrainStatus(*answer) for answer in answers if answer is not None), NO_DRAIN))

    async def _call_others(self, asker: int, name: str, **arguments: Any) -> list[Any]:
        calls = [self._call(number, name, **arguments) for number in self._workers if number != asker]
        return await asyncio.gather(*calls)

    async def _call(self, number: int, name: str, **arguments: Any) -> Any:
        """None when that worker is gone."""
        worker = self._workers.get(number)
        try:
            return await worker.channel.call(name, **arguments) if worker is not None else None
        except ChannelClosedError:
            return None
