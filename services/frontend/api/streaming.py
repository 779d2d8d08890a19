"""What the RPCs that generate do alike: headers, writes to a client that may be gone, costly messages in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc.aio

from frontend.api.logprobs_messages import MAX_ENTRIES_ON_LOOP
from frontend.generation import ClientGoneError, Generation

Message = TypeVar("Message")


async def convert(num_entries: int, make: Callable[[], Message]) -> Message:
    """Make a message: with many log-probabilities in a thread, because it would hold up all other streams."""
    if num_entries > MAX_ENTRIES_ON_LOOP:
        return await asyncio.to_thread(make)
    return make()


@contextmanager
def writing() -> Iterator[None]:
    """Around what is written to the client. Raises ClientGoneError."""
    try:
        yield
    except grpc.aio.InternalError as error:
        # The connection broke, and gRPC has not yet come to cancel this handler.
        raise ClientGoneError from error


def headers_of(generation: Generation) -> tuple[tuple[str, str], ...]:
    """Initial metadata; not sent before the engine has queued the request, as a client's own retries end with it."""
    return (("x-request-id", generation.request_id), ("x-engine-id", generation.engine_id))
