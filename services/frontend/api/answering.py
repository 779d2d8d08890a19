"""What every RPC of the public API does alike: errors become rich statuses, and metadata is read.

CancelledError and AbortError are never caught here: both are how gRPC ends a handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc.aio

from frontend.engine_client.pool import RANK_FIELD
from frontend.generation import ClientGoneError
from frontend.request_trace import set_error_type
from stepwire.errors import InvalidRequestError, RequestFailedError, StepwireError
from stepwire.grpc_errors import abort_with

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Servicer = TypeVar("Servicer")
Request = TypeVar("Request")
Answer = TypeVar("Answer")
Rpc = Callable[[Servicer, Request, Context], Awaitable[Answer]]


class HasMetadata(Protocol):
    """A gRPC call, or an HTTP request whose headers stand for the metadata."""

    def invocation_metadata(self) -> Any: ...


MAX_REQUEST_ID_CHARS = 256
MAX_RANK_DIGITS = 6
# The names that gateways use for what requests are to share fairly, and for what they are for. The first that is there
# counts: whoever tells no tenants apart still has the kinds of their requests share.
CLIENT_CLASS_KEYS = ("x-gateway-inference-fairness-id", "x-gateway-inference-objective")
MAX_CLIENT_CLASS_CHARS = 128
# A status is written in microseconds, or waits behind output that nobody reads.
STATUS_TIMEOUT_S = 1.0


def answers_errors(rpc: Rpc[Servicer, Request, Answer]) -> Rpc[Servicer, Request, Answer]:
    """Decorate an RPC: a StepwireError is its status, anything else is logged and INTERNAL. The server lives on."""

    @functools.wraps(rpc)
    async def answered(self: Servicer, request: Request, context: Context) -> Answer:
        try:
            return await rpc(self, request, context)
        except StepwireError as error:
            await _end_with(context, error)
        except grpc.aio.AbortError:
            raise
        except ClientGoneError:
            # Nobody reads the status; it ends the call on our side.
            await _end_with(context, RequestFailedError("the client is gone", reason="CANCELLED"))
        except Exception:
            logger.exception("RPC failed")
            await _end_with(context, RequestFailedError("internal error of the frontend", reason="INTERNAL"))

    return answered


async def _end_with(context: Context, error: StepwireError) -> NoReturn:
    """Give the status to gRPC and end the handler, also when the client does not read and the status has to wait."""
    set_error_type(error)
    # The latter: the connection broke, and nobody reads the status.
    with contextlib.suppress(TimeoutError, grpc.aio.InternalError):
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            await abort_with(context, error)
    # The status is on its way: it arrives when the client reads on. Only the peer, or the end of the connection or of
    # the server, can free the call itself. With this exception gRPC takes the handler as over.
    raise asyncio.CancelledError


def caller_of(context: HasMetadata) -> str:
    """Its Authorization header, from which the gate makes a Caller with a namespace of request ids of its own."""
    return metadata_of(context, "authorization")


def client_class_of(context: HasMetadata) -> str:
    """Whose share of the engines the request uses; empty = that of everybody without a class at this frontend."""
    for key in CLIENT_CLASS_KEYS:
        client_class = metadata_of(context, key)
        if len(client_class) > MAX_CLIENT_CLASS_CHARS:
            raise InvalidRequestError.of_field(key, f"more than {MAX_CLIENT_CLASS_CHARS} characters")
        if client_class:
            return client_class
    return ""


def request_id_of(field: str, context: HasMetadata) -> str:
    """The caller's id from the message or from metadata, or a new one. It travels in headers, so it must be plain."""
    request_id = field or metadata_of(context, "x-request-id")
    if not request_id:
        return uuid.uuid4().hex
    if len(request_id) > MAX_REQUEST_ID_CHARS or not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequestError.of_field(
            "request_id", f"at most {MAX_REQUEST_ID_CHARS} printable ASCII characters are allowed"
        )
    return request_id


def rank_of(context: HasMetadata) -> int | None:
    """The rank of the engine that the caller wants; None = any."""
    value = metadata_of(context, RANK_FIELD)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= MAX_RANK_DIGITS):
        raise InvalidRequestError.of_field(RANK_FIELD, f"{value[:MAX_RANK_DIGITS]!r} is not the number of a rank")
    return int(value)


def metadata_of(context: HasMetadata, key: str) -> str:
    """The first value of a key; empty without one."""
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""
