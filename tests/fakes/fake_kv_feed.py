"""KvEventsService of the fake engine: says what the test puts in, to one subscriber. Owner: the test's event loop."""

from __future__ import annotations

import asyncio

import grpc.aio

from stepwire.engine.v1 import engine_core_pb2 as pb
from stepwire.engine.v1 import engine_core_pb2_grpc as pb_grpc
from stepwire.errors import StepwireError
from stepwire.grpc_errors import abort_with


class FakeKvFeed(pb_grpc.KvEventsServiceServicer):
    """Refuses while it is off, as an engine without the feed does."""

    def __init__(self) -> None:
        self.is_on = False
        # None = the end.
        self.responses: asyncio.Queue[pb.SubscribeKvEventsResponse | StepwireError | None] = asyncio.Queue()
        self.starts: list[int] = []
        self.has_begun = asyncio.Event()
        self.is_over = asyncio.Event()

    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext) -> None:
        if not self.is_on:
            await abort_with(context, StepwireError("start it with --enable-kv-events", reason="UNSUPPORTED_FEATURE"))
        self.starts.append(request.start_sequence)
        self.has_begun.set()
        await context.send_initial_metadata(())
        try:
            while (response := await self.responses.get()) is not None:
                if isinstance(response, StepwireError):
                    await abort_with(context, response)
                await context.write(response)
        finally:
            self.is_over.set()
