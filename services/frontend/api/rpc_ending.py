"""With which status an RPC of grpc.aio ended, whichever way its handler was left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class RpcEnding:
    """`code` is UNKNOWN until the handler was left, and stays so when an exception of its own left it."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN


@contextmanager
def watch_ending(context: Context, ending: RpcEnding) -> Iterator[None]:
    """Around a handler: fills in `ending`, and changes nothing."""
    try:
        yield
        ending.code = _code_of(context)
    except (asyncio.CancelledError, GeneratorExit):
        ending.code = _code_of(context) if context.done() else _code_of_cancel(context)
        raise
    except grpc.aio.AbortError:
        ending.code = _code_of(context)
        raise


def _code_of_cancel(context: Context) -> grpc.StatusCode:
    """The deadline cancels the handler just as the caller does."""
    return grpc.StatusCode.DEADLINE_EXCEEDED if context.time_remaining() == 0 else grpc.StatusCode.CANCELLED


def _code_of(context: Context) -> grpc.StatusCode:
    """The code a handler has set; the context has an integer, and 0 when nothing was set."""
    value: Any = context.code()
    if isinstance(value, grpc.StatusCode):
        return value
    return next((code for code in grpc.StatusCode if code.value[0] == value), grpc.StatusCode.OK)
