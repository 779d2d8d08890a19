"""The fake engine keeps the contract of the wire itself: batches are numbered in the order they are written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from fakes.fake_engine_session import FakeEngineSession
from stepwire.engine.v1 import engine_core_pb2 as pb


class Context:
    def __init__(self) -> None:
        self.frames: list[pb.ConnectResponse] = []

    async def write(self, frame: pb.ConnectResponse) -> None:
        self.frames.append(frame)


async def test_a_batch_that_overtakes_another_gets_the_lower_number() -> None:
    context = Context()
    engine = SimpleNamespace(ready=pb.Ready(), stats=pb.SchedulerStats(), monotonic_ns=lambda: 0)
    session = FakeEngineSession(engine, context)
    for _ in range(4):
        session.send_outputs(handles=[1], token_ids=[1])
    # The queue is full: this one waits, and the next one takes the first place that is free.
    waiting = asyncio.create_task(session._send_batch(handles=[2], token_ids=[2]))
    await asyncio.sleep(0)
    session._frames.get_nowait()
    session.send_outputs(handles=[3], token_ids=[3])
    writer = asyncio.create_task(session._write())
    await waiting
    await session._frames.put(None)
    await writer

    assert [list(frame.outputs.handles) for frame in context.frames] == [[1], [1], [1], [3], [2]]
    assert [frame.outputs.batch_seq for frame in context.frames] == [1, 2, 3, 4, 5]
