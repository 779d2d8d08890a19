"""The feed of an engine's prefix cache, for those that relay it: batches free of protobuf, over a channel of its own.

Owner: the task that reads it, on the event loop. The engine keeps what a slow reader has not taken, and cuts it when
it falls too far behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from frontend.engine_client.channel import open_channel
from frontend.engine_client.connection_state import ClientIdentity
from frontend.retry_advice import RETRY_AFTER_MS
from stepwire import token_array
from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc as pb_grpc
from stepwire.errors import InvalidRequestError, OverloadedError, StepwireError, UnavailableError
from stepwire.grpc_errors import reason_of

# An engine that refuses says so within a fraction of this; one that has nothing to tell yet says nothing.
REFUSAL_S = 0.5
# A part of a snapshot may have 2 MiB, which takes tens of milliseconds to read.
MAX_BYTES_ON_LOOP = 32 * 1024


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks entered the cache, as a chain behind `parent_hash`; empty = they begin a prompt."""

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes
    # Of all the blocks; none where a salt is in the hashes.
    token_ids: list[int]
    block_size: int
    group: int
    is_salted: bool


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left the cache."""

    block_hashes: tuple[bytes, ...]
    group: int


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The cache is empty."""


KvChange = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class KvChanges:
    """Changes of one step, or a part of a snapshot. `sequence` 0 = more parts follow."""

    sequence: int
    rank: int
    changes: list[KvChange]

    @property
    def num_tokens(self) -> int:
        return sum(len(change.token_ids) for change in self.changes if isinstance(change, BlocksStored))


class KvEventFeed:
    """Call `begin` once, then `next` until it returns None."""

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[pb.SubscribeKvEventsRequest, pb.SubscribeKvEventsResponse]
    ) -> None:
        self._call = call
        self._first: asyncio.Task[KvChanges | None] | None = None
        self._is_ended = False

    async def begin(self) -> None:
        """Return once it is clear that the engine does not refuse. Raises StepwireError when it does."""
        self._first = asyncio.create_task(self._read())
        await asyncio.wait({self._first}, timeout=REFUSAL_S)
        if self._first.done():
            self._first.result()

    async def next(self) -> KvChanges | None:
        """None = the engine has ended the feed. Raises StepwireError."""
        if self._first is not None:
            first, self._first = self._first, None
            return await first
        return await self._read()

    def end(self) -> None:
        """Wakes the reader up."""
        self._is_ended = True
        self._call.cancel()

    async def _read(self) -> KvChanges | None:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _to_error(error) from error
        except asyncio.CancelledError:
            if not self._is_ended:
                raise
            # Of the call and not of the reader, who has to answer somebody.
            raise UnavailableError("this frontend is shutting down", reason="DRAINING") from None
        if not isinstance(response, pb.SubscribeKvEventsResponse):
            return None
        if response.ByteSize() > MAX_BYTES_ON_LOOP:
            return await asyncio.to_thread(_to_changes, response)
        return _to_changes(response)


class KvEventFeeds:
    """All feeds that are read; `close` ends them, or their readers would hold up the end of the server."""

    def __init__(self, identity: ClientIdentity) -> None:
        self._identity = identity
        self._open: set[KvEventFeed] = set()

    @asynccontextmanager
    async def open(self, endpoint: str, start_sequence: int) -> AsyncIterator[KvEventFeed]:
        """That of one engine, from a batch on that it may still have, or else with a snapshot first."""
        channel = open_channel(endpoint, self._identity)
        request = pb.SubscribeKvEventsRequest(start_sequence=start_sequence)
        feed = KvEventFeed(pb_grpc.KvEventsServiceStub(channel).SubscribeKvEvents(request))
        self._open.add(feed)
        try:
            await feed.begin()
            yield feed
        finally:
            self._open.discard(feed)
            feed.end()
            await channel.close(None)

    def close(self) -> None:
        for feed in self._open:
            feed.end()


def _to_changes(response: pb.SubscribeKvEventsResponse) -> KvChanges:
    changes = [_to_change(event) for event in response.events]
    return KvChanges(response.sequence, response.data_parallel_rank, changes)


def _to_change(event: pb.KvEvent) -> KvChange:
    if event.HasField("stored"):
        stored = event.stored
        return BlocksStored(
            tuple(stored.block_hashes),
            stored.parent_block_hash,
            token_array.unpack(stored.token_ids),
            stored.block_size,
            stored.group,
            stored.salted,
        )
    if event.HasField("removed"):
        return BlocksRemoved(tuple(event.removed.block_hashes), event.removed.group)
    return AllCleared()


def _to_error(error: grpc.aio.AioRpcError) -> StepwireError:
    text, reason = error.details() or "the engine gave no reason", reason_of(error)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return InvalidRequestError(text, reason="UNSUPPORTED_FEATURE")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return OverloadedError(text, reason=reason or OverloadedError.default_reason, retry_after_ms=RETRY_AFTER_MS)
    return UnavailableError(f"the feed of cache events has ended: {text}", retry_after_ms=RETRY_AFTER_MS)
