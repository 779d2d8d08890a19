"""The one table from error reasons to gRPC statuses, and the building of rich statuses (google.rpc.Status).

Every error status carries ErrorInfo{reason, domain, metadata}; field errors add BadRequest, overload adds RetryInfo,
and a limit of the caller's own QuotaFailure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from stepwire.errors import StepwireError

DOMAIN = "stepwire"

Code = grpc.StatusCode

# reason -> (status, retryable: may the same request succeed later or elsewhere?)
REASONS: dict[str, tuple[grpc.StatusCode, bool]] = {
    "FIELD_INVALID": (Code.INVALID_ARGUMENT, False),
    "CONTEXT_LENGTH_EXCEEDED": (Code.INVALID_ARGUMENT, False),
    "GRAMMAR_INVALID": (Code.INVALID_ARGUMENT, False),
    "PROTOCOL_VIOLATION": (Code.INVALID_ARGUMENT, False),
    "ENGINE_NOT_FOUND": (Code.NOT_FOUND, False),
    "MODEL_NOT_FOUND": (Code.NOT_FOUND, False),
    "DUPLICATE_REQUEST": (Code.ALREADY_EXISTS, False),
    "CHAT_TEMPLATE_NOT_ALLOWED": (Code.PERMISSION_DENIED, False),
    "QUEUE_FULL": (Code.RESOURCE_EXHAUSTED, True),
    "RATE_LIMITED": (Code.RESOURCE_EXHAUSTED, True),
    "UNAUTHENTICATED": (Code.UNAUTHENTICATED, False),
    "PERMISSION_DENIED": (Code.PERMISSION_DENIED, False),
    "SLOW_CLIENT": (Code.RESOURCE_EXHAUSTED, False),
    "KV_CAPACITY": (Code.FAILED_PRECONDITION, False),
    "PROTOCOL_VERSION": (Code.FAILED_PRECONDITION, False),
    "MODEL_MISMATCH": (Code.FAILED_PRECONDITION, False),
    "TOKENIZER_MISMATCH": (Code.FAILED_PRECONDITION, False),
    "TOKENIZER_UNUSABLE": (Code.FAILED_PRECONDITION, False),
    "WEIGHTS_MISMATCH": (Code.FAILED_PRECONDITION, False),
    "ENGINE_ID_TAKEN": (Code.FAILED_PRECONDITION, False),
    "ENGINE_PAUSED": (Code.FAILED_PRECONDITION, False),
    "PAUSE_PENDING": (Code.FAILED_PRECONDITION, True),
    "ENGINE_SLEEPING": (Code.FAILED_PRECONDITION, False),
    "ENGINE_NOT_PAUSED": (Code.FAILED_PRECONDITION, False),
    "WEIGHT_UPDATE_OPEN": (Code.FAILED_PRECONDITION, False),
    "WEIGHT_UPDATE_UNKNOWN": (Code.FAILED_PRECONDITION, False),
    "WEIGHT_UPDATE_INCOMPLETE": (Code.FAILED_PRECONDITION, False),
    "WEIGHTS_UNUSABLE": (Code.FAILED_PRECONDITION, False),
    "PROFILING_OFF": (Code.FAILED_PRECONDITION, False),
    "PROFILE_RUNNING": (Code.FAILED_PRECONDITION, False),
    "PROFILE_NOT_RUNNING": (Code.FAILED_PRECONDITION, False),
    "SESSION_REPLACED": (Code.ABORTED, False),
    "DRAINING": (Code.UNAVAILABLE, True),
    "ENGINE_STARTING": (Code.UNAVAILABLE, True),
    "ENGINE_DEAD": (Code.UNAVAILABLE, True),
    "REQUEST_FAILED": (Code.INTERNAL, True),
    "GRAMMAR_VIOLATION": (Code.INTERNAL, True),
    "UTILITY_FAILED": (Code.INTERNAL, False),
    "OUTPUT_PROCESSING": (Code.INTERNAL, True),
    "INTERNAL": (Code.INTERNAL, True),
    "QUEUE_TIMEOUT": (Code.DEADLINE_EXCEEDED, True),
    "DEADLINE": (Code.DEADLINE_EXCEEDED, False),
    "CANCELLED": (Code.CANCELLED, False),
    "UNSUPPORTED_FEATURE": (Code.UNIMPLEMENTED, False),
}

# Trailers must stay below 4 KiB: above 8 KiB gRPC drops them at random, and code and reason with them. The text travels
# twice, once percent-encoded, which makes three bytes of each that is not ASCII.
MAX_MESSAGE_BYTES = 512
MAX_METADATA_BYTES = 128
MAX_VIOLATIONS_BYTES = 1024


def status_code(reason: str) -> grpc.StatusCode:
    """The gRPC status of a reason; an unknown reason is a bug of ours and shows as INTERNAL."""
    return REASONS.get(reason, REASONS["INTERNAL"])[0]


def is_retryable(error: StepwireError) -> bool:
    """Whether the same request may succeed later or elsewhere."""
    if error.retryable is not None:
        return error.retryable
    return REASONS.get(error.reason, REASONS["INTERNAL"])[1]


def to_status(error: StepwireError, **metadata: str | int) -> status_pb2.Status:
    """The rich status of an error. `metadata` (request_id, engine_id, tokens_emitted) goes into ErrorInfo."""
    code = status_code(error.reason)
    status = status_pb2.Status(code=code_pb2.Code.Value(code.name), message=cut(error.message, MAX_MESSAGE_BYTES))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    for key, value in {**error.metadata, **metadata, "retryable": str(is_retryable(error)).lower()}.items():
        if value != "":
            info.metadata[key] = cut(str(value), MAX_METADATA_BYTES)
    status.details.add().Pack(info)
    if error.violations:
        status.details.add().Pack(_bad_request(error))
    if error.quota:
        status.details.add().Pack(_quota_failure(error))
    if error.retry_after_ms:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _bad_request(error: StepwireError) -> error_details_pb2.BadRequest:
    """As many violations as fit; the first ones say enough to mend the request."""
    bad_request, num_bytes = error_details_pb2.BadRequest(), 0
    for violation in error.violations:
        field = cut(violation.field, MAX_METADATA_BYTES)
        description = cut(violation.description, MAX_METADATA_BYTES)
        num_bytes += len(field.encode()) + len(description.encode())
        if num_bytes > MAX_VIOLATIONS_BYTES:
            break
        bad_request.field_violations.add(field=field, description=description)
    return bad_request


def _quota_failure(error: StepwireError) -> error_details_pb2.QuotaFailure:
    failure = error_details_pb2.QuotaFailure()
    for violation in error.quota:
        failure.violations.add(
            subject=cut(violation.subject, MAX_METADATA_BYTES),
            description=cut(violation.description, MAX_METADATA_BYTES),
        )
    return failure


def cut(text: str, max_bytes: int) -> str:
    """The start of a text that takes at most `max_bytes` in percent-encoding, cut between characters."""
    num_bytes = 0
    for index, character in enumerate(text[:max_bytes]):
        num_bytes += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode(errors="replace"))
        if num_bytes > max_bytes:
            return text[:index]
    return text[:max_bytes]


def trailers(error: StepwireError, **metadata: str | int) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata of an error: the rich status, and the pushback that stops or delays gRPC's own retries."""
    rich: tuple[str, str | bytes] = ("grpc-status-details-bin", to_status(error, **metadata).SerializeToString())
    if error.retry_after_ms:
        return (rich, ("grpc-retry-pushback-ms", str(error.retry_after_ms)))
    return (rich,)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason in the rich status of a failed call; empty when there is none."""
    info = error_details_pb2.ErrorInfo()
    # The stubs take the metadata for one pair.
    metadata = cast("Iterable[tuple[str, bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == "grpc-status-details-bin":
            with contextlib.suppress(DecodeError):
                any(detail.Unpack(info) for detail in status_pb2.Status.FromString(value).details)
    return str(info.reason)


async def abort_with(
    context: grpc.aio.ServicerContext[object, object], error: StepwireError, **metadata: str | int
) -> NoReturn:
    """End an asyncio RPC with this error. Raises, as `context.abort` does."""
    await context.abort(
        status_code(error.reason), cut(error.message, MAX_MESSAGE_BYTES), trailing_metadata=trailers(error, **metadata)
    )
    raise AssertionError("context.abort always raises")


def abort_sync(context: grpc.ServicerContext, error: StepwireError, **metadata: str | int) -> NoReturn:
    """End a threaded RPC with this error. Raises, as `context.abort` does."""
    context.set_trailing_metadata(trailers(error, **metadata))
    context.abort(status_code(error.reason), cut(error.message, MAX_MESSAGE_BYTES))
    raise AssertionError("context.abort always raises")
