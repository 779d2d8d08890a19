"""What waits to be written to one engine. Puts are synchronous, so that an abort can be sent from a `finally`.

Owner: the event loop. Order is kept: an add is written before the abort of its handle. Adds of one tick of the loop
share frames.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from frontend.engine_client.engine_facts import EngineFacts
from stepwire.engine.v1 import engine_core_pb2 as pb

# Far below the message limit: many adds of one tick must not make a frame that is refused, or hold up the loop.
MAX_ADD_FRAME_BYTES = 4 * 1024 * 1024


class NewRequest(NamedTuple):
    """One choice to be added. It becomes a message with its frame: until then a thousand choices share their ids."""

    handle: int
    # Of the message, at most.
    num_bytes: int
    # Makes the empty message that of this handle, with times as of `now`; called again for a second engine.
    fill: Callable[[pb.EngineCoreRequest, int, float], None]
    # What every line about it carries.
    log_fields: Mapping[str, str]
    # Told when a second engine gets it, of which nothing else may be seen before its end.
    on_move: Callable[[EngineFacts], None] | None = None


class Outbox:
    """A queue of frames with one reader, the writer task of the session."""

    def __init__(self) -> None:
        self._items: deque[NewRequest | pb.ConnectRequest] = deque()
        self._has_items = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request: NewRequest) -> None:
        """Queue a new request."""
        self._put(request)

    def abort(self, handles: Sequence[int], reason: pb.AbortReason.ValueType) -> None:
        """Queue an abort."""
        self._put(pb.ConnectRequest(abort=pb.AbortRequests(handles=handles, reason=reason)))

    def put(self, frame: pb.ConnectRequest) -> None:
        """Queue any other frame."""
        self._put(frame)

    def _put(self, item: NewRequest | pb.ConnectRequest) -> None:
        self._items.append(item)
        self._has_items.set()

    async def wait(self) -> None:
        """Return when there is something to write."""
        await self._has_items.wait()

    def take(self) -> Iterator[pb.ConnectRequest]:
        """The frames of everything queued, also of what is put while the caller writes."""
        while self._items:
            item = self._items[0]
            if isinstance(item, pb.ConnectRequest):
                self._items.popleft()
                yield item
            else:
                yield self._take_adds()
        self._has_items.clear()

    def _take_adds(self) -> pb.ConnectRequest:
        """As many of the next adds as fit into a frame, and the first in any case."""
        frame, num_bytes, now = pb.ConnectRequest(), 0, time.monotonic()
        while self._items:
            request = self._items[0]
            if isinstance(request, pb.ConnectRequest):
                break
            num_bytes += request.num_bytes
            if frame.add.requests and num_bytes > MAX_ADD_FRAME_BYTES:
                break
            self._items.popleft()
            request.fill(frame.add.requests.add(), request.handle, now)
        return frame
