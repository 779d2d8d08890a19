"""How an RPC of the public API ends with an error, also when nobody takes the error."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from frontend.api import answering
from frontend.api.answering import answers_errors
from stepwire.errors import OverloadedError


class Context:
    """Takes a status at once, or when `may_send` is set."""

    def __init__(self, *, reads: bool) -> None:
        self.codes: list[grpc.StatusCode] = []
        self.may_send = asyncio.Event()
        if reads:
            self.may_send.set()

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: tuple) -> None:
        self.codes.append(code)
        await self.may_send.wait()
        raise grpc.aio.AbortError


@answers_errors
async def refuse(self: None, request: None, context: Context) -> None:
    raise OverloadedError("too slow", reason="SLOW_CLIENT")


async def test_error_becomes_the_status() -> None:
    context = Context(reads=True)
    with pytest.raises(grpc.aio.AbortError):
        await refuse(None, None, context)
    assert context.codes == [grpc.StatusCode.RESOURCE_EXHAUSTED]


async def test_handler_ends_although_its_status_is_not_read(monkeypatch) -> None:
    monkeypatch.setattr(answering, "STATUS_TIMEOUT_S", 0.01)
    context = Context(reads=False)
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await refuse(None, None, context)
    assert context.codes == [grpc.StatusCode.RESOURCE_EXHAUSTED]


class BrokenContext(Context):
    """Its connection breaks while the status is written."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: tuple) -> None:
        self.codes.append(code)
        raise grpc.aio.InternalError("the batch failed")


async def test_handler_ends_as_cancelled_when_its_status_can_not_be_written() -> None:
    context = BrokenContext(reads=True)
    with pytest.raises(asyncio.CancelledError):
        await refuse(None, None, context)
    assert context.codes == [grpc.StatusCode.RESOURCE_EXHAUSTED]
