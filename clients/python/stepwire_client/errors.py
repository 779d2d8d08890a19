"""The one exception of the client: a failed call with its status code and everything the rich status says.

Never holds prompt or output text: the server does not put any into its errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import cast

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

# Reason of failures that no server explained: nothing listens there, or the connection broke.
NO_REASON = ""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field the server refused, by its path in the request."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """A limit of the caller's own that was reached."""

    subject: str
    description: str


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What google.rpc.Status carried next to code and message; empty where the server sent nothing."""

    violations: tuple[FieldViolation, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    retry_after_s: float = 0.0
    quota: tuple[QuotaViolation, ...] = ()
    # How long a busy server keeps repeated calls away, in milliseconds; below 0 = for good; None = it did not say.
    pushback_ms: int | None = None


class CallError(Exception):
    """A call failed. `code` is the gRPC status, `reason` stepwire's own (empty when no server answered)."""

    def __init__(self, code: grpc.StatusCode, message: str, reason: str, details: ErrorDetails) -> None:
        super().__init__(f"{code.name} {reason}: {message}" if reason else f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.details = details

    @property
    def is_retryable(self) -> bool:
        """The server says that the same request may succeed later."""
        return self.details.metadata.get("retryable") == "true"

    @property
    def tokens_emitted(self) -> int:
        """Output tokens that had been written to the caller when the request ended."""
        return int(self.details.metadata.get("tokens_emitted", 0))

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError) -> CallError:
        """Read code, message and rich status of a failed call."""
        reason, details = _read_details(error)
        details = replace(details, pushback_ms=_pushback_ms(error))
        return cls(error.code(), error.details() or "", reason, details)


def _read_details(error: grpc.RpcError) -> tuple[str, ErrorDetails]:
    status = _read_status(error)
    if status is None:
        return NO_REASON, ErrorDetails()
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    quota_failure = error_details_pb2.QuotaFailure()
    for packed in status.details:
        for message in (info, bad_request, retry, quota_failure):
            packed.Unpack(message)
    violations = tuple(FieldViolation(item.field, item.description) for item in bad_request.field_violations)
    retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    quota = tuple(QuotaViolation(item.subject, item.description) for item in quota_failure.violations)
    return info.reason, ErrorDetails(violations, dict(info.metadata), retry_after_s, quota)


def _pushback_ms(error: grpc.RpcError) -> int | None:
    value = dict(trailers_of(error)).get("grpc-retry-pushback-ms")
    if value is None:
        return None
    # What is no number means "not at all", as in gRPC itself.
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else -1


def trailers_of(error: grpc.RpcError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata of a failed call; empty when no server answered."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return ()
    return tuple(cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ()))


def _read_status(error: grpc.RpcError) -> status_pb2.Status | None:
    # What a stub raises is its call as well, or with asyncio has all of a call that is read here.
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return None
    try:
        return rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:
        # gRPC or a proxy has put a status of its own in place of the one that the details belong to.
        return None
