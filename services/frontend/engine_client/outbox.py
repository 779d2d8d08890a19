"""What waits to be written to one engine. Puts are synchronous, so that an abort can be sent from a `finally`.

Owner: the event loop. Order is kept: an add is written before the abort of its handle. Adds of one tick of the loop
share a frame.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence

from stepwire.engine.v1 import engine_core_pb2 as pb

# Far below the message limit: many long prompts of one tick must not add up to a frame that is refused.
MAX_ADD_FRAME_BYTES = 4 * 1024 * 1024


class Outbox:
    """A queue of frames with one reader, the writer task of the session."""

    def __init__(self) -> None:
        self._items: deque[pb.EngineCoreRequest | pb.ConnectRequest] = deque()
        self._has_items = asyncio.Event()

    def add(self, request: pb.EngineCoreRequest) -> None:
        """Queue a new request."""
        self._put(request)

    def abort(self, handles: Sequence[int], reason: pb.AbortReason.ValueType) -> None:
        """Queue an abort."""
        self._put(pb.ConnectRequest(abort=pb.AbortRequests(handles=handles, reason=reason)))

    def put(self, frame: pb.ConnectRequest) -> None:
        """Queue any other frame."""
        self._put(frame)

    def _put(self, item: pb.EngineCoreRequest | pb.ConnectRequest) -> None:
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
                yield pb.ConnectRequest(add=self._take_adds())
        self._has_items.clear()

    def _take_adds(self) -> pb.AddRequests:
        frame = pb.AddRequests()
        num_bytes = 0
        while self._items and num_bytes < MAX_ADD_FRAME_BYTES:
            request = self._items[0]
            if not isinstance(request, pb.EngineCoreRequest):
                break
            self._items.popleft()
            num_bytes += len(request.prompt_token_ids) + len(request.resume_output_token_ids)
            frame.requests.append(request)
        return frame
