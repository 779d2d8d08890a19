"""Calls of the synchronous client: every failure is a CallError, and a stream that is left is cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Any, TypeAlias, TypeVar

import grpc

from stepwire_client.call_facts import CallFacts
from stepwire_client.credentials import Metadata
from stepwire_client.errors import CallError
from stepwire_client.resuming import DivergedError, ResumableStream

Response = TypeVar("Response")
# Quoted: generic for type checkers only.
Method: TypeAlias = "grpc.UnaryUnaryMultiCallable[Any, Response]"
StreamingMethod: TypeAlias = "grpc.UnaryStreamMultiCallable[Any, Response]"


def call(
    method: Method[Response],
    request: Any,
    timeout_s: float | None,
    metadata: Metadata,
    facts: CallFacts | None = None,
) -> Response:
    """The answer of a unary method. Raises CallError."""
    try:
        response, done = method.with_call(request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        _note(facts, error)
        raise CallError.from_rpc_error(error) from error
    _note(facts, done)
    return response


def stream(
    method: StreamingMethod[Response],
    request: Any,
    timeout_s: float | None,
    metadata: Metadata,
    facts: CallFacts | None = None,
) -> Generator[Response, None, None]:
    """The messages of a streaming method. Raises CallError."""
    running: Any = method(request, timeout=timeout_s, metadata=metadata)
    try:
        yield from running
        _note(facts, running)
    except grpc.RpcError as error:
        _note(facts, error)
        raise CallError.from_rpc_error(error) from error
    finally:
        # A no-op after the last message; otherwise it is what frees the request's KV blocks in the engine.
        running.cancel()


def resuming(
    stream_once: Callable[[Any, float | None], Generator[Response, None, None]],
    abort: Callable[[str, float], object],
    resumable: ResumableStream[Any, Response],
) -> Generator[Response, None, None]:
    """The messages of one answer, over as many calls as `resumable` finds worth it."""
    while True:
        try:
            with closing(stream_once(resumable.request(), resumable.deadline.remaining())) as messages:
                for message in messages:
                    yield from resumable.take(message)
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
                abort(resumable.request_id_to_abort, resumable.abort_timeout_s)
        time.sleep(delay_s)


def _note(facts: CallFacts | None, done: Any) -> None:
    # What a closed channel raises is no call.
    if facts is not None and isinstance(done, grpc.Call):
        facts.note(done.initial_metadata(), done.trailing_metadata())
