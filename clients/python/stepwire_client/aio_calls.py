"""Calls of the asyncio client: every failure is a CallError, and a stream that is left is cancelled.

Owner: the event loop. CancelledError is only ever the caller's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from stepwire_client.call_facts import CallFacts
from stepwire_client.credentials import Metadata
from stepwire_client.errors import CallError, ErrorDetails
from stepwire_client.resuming import DivergedError, ResumableStream

Response = TypeVar("Response")
# Quoted: generic for type checkers only.
Method: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[Any, Response]"
StreamingMethod: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[Any, Response]"


async def call(
    method: Method[Response],
    request: Any,
    timeout_s: float | None,
    metadata: Metadata,
    facts: CallFacts | None = None,
) -> Response:
    """The answer of a unary method. Raises CallError."""
    async with _running(method, request, timeout_s, metadata, facts) as running:
        response: Response = await running
        return response


async def stream(
    method: StreamingMethod[Response],
    request: Any,
    timeout_s: float | None,
    metadata: Metadata,
    facts: CallFacts | None = None,
) -> AsyncGenerator[Response, None]:
    """The messages of a streaming method. Raises CallError."""
    async with _running(method, request, timeout_s, metadata, facts) as running:
        async for message in running:
            yield message


async def resuming(
    stream_once: Callable[[Any, float | None], AsyncGenerator[Response, None]],
    abort: Callable[[str, float], Awaitable[object]],
    resumable: ResumableStream[Any, Response],
) -> AsyncGenerator[Response, None]:
    """The messages of one answer, over as many calls as `resumable` finds worth it."""
    while True:
        try:
            async with aclosing(stream_once(resumable.request(), resumable.deadline.remaining())) as messages:
                async for message in messages:
                    for answer in resumable.take(message):
                        yield answer
            return
        except DivergedError:
            continue
        except CallError as error:
            if resumable.is_finished:
                return
            delay_s = resumable.delay_after(error)
        if resumable.request_id_to_abort:
            # Where the server can not be reached, it has noticed as well.
            with suppress(CallError):
                await abort(resumable.request_id_to_abort, resumable.abort_timeout_s)
        await asyncio.sleep(delay_s)


@asynccontextmanager
async def _running(
    method: Any, request: Any, timeout_s: float | None, metadata: Metadata, facts: CallFacts | None
) -> AsyncIterator[Any]:
    try:
        running = method(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.UsageError as error:
        raise _closed() from error
    try:
        yield running
        if facts is not None:
            facts.note(await running.initial_metadata(), await running.trailing_metadata())
    except grpc.aio.AioRpcError as error:
        if facts is not None:
            facts.note(error.initial_metadata(), error.trailing_metadata())
        raise CallError.from_rpc_error(error) from error
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        # The call was cancelled under a task that was not: its client was closed.
        raise _closed() from error
    finally:
        # A no-op after the end; otherwise it is what frees the request's KV blocks in the engine.
        running.cancel()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _closed() -> CallError:
    return CallError(grpc.StatusCode.CANCELLED, "the client was closed", "", ErrorDetails())
