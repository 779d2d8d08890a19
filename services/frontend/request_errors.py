"""The errors a request can meet in the frontend itself, and what every error is told about its request. No state."""

from __future__ import annotations

import copy
import logging

from grpc import StatusCode

from frontend.config import FrontendSettings
from frontend.generation import Generation
from frontend.retry_advice import RETRY_AFTER_MS
from stepwire.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    StepwireError,
    UnavailableError,
)
from stepwire.grpc_errors import status_code

logger = logging.getLogger(__name__)

# Ends that the caller or the clock brought about; they are no failures of ours.
_ABORT_REASONS = frozenset({"DEADLINE", "QUEUE_TIMEOUT", "SLOW_CLIENT", "CANCELLED"})


def draining_error() -> UnavailableError:
    """This frontend is shutting down."""
    return UnavailableError("this frontend is shutting down", reason="DRAINING", retry_after_ms=RETRY_AFTER_MS)


def duplicate_error(request_id: str, tokens_emitted: int) -> InvalidRequestError:
    """Another request of this caller has the id, in this process or another one."""
    return InvalidRequestError(
        f"request_id {request_id!r} is in flight; abort it, or resume it when its stream is lost",
        reason="DUPLICATE_REQUEST",
        metadata={"tokens_emitted": str(tokens_emitted)},
    )


def slow_client_error(settings: FrontendSettings) -> OverloadedError:
    return OverloadedError(
        f"the client left more than {settings.slow_client_bytes} bytes unread, or read nothing for "
        f"{settings.slow_client_timeout_s:g} s",
        reason="SLOW_CLIENT",
    )


def as_stepwire_error(caught: Exception, request_id: str) -> StepwireError:
    if isinstance(caught, StepwireError):
        return caught
    logger.error("request failed", exc_info=caught, extra={"request_id": request_id})
    return RequestFailedError("internal error of the frontend", reason="INTERNAL")


def with_facts(error: StepwireError, request_id: str, generation: Generation | None) -> StepwireError:
    """A copy for this request: several may share one error, the death of their engine for instance."""
    told = copy.copy(error)
    told.metadata = {"request_id": request_id, "tokens_emitted": "0", **error.metadata}
    if generation is None:
        return told
    told.metadata.update(engine_id=generation.engine_id)
    if generation.tokens_emitted:
        # To generate them again would be wrong, so this is resumed and not retried.
        told.metadata["tokens_emitted"] = str(generation.tokens_emitted)
        told.retryable = False
        told.retry_after_ms = 0
    return told


def finished_reason_of(error: StepwireError, *, is_admitted: bool) -> str:
    """The label of requests_finished_total for choices that end with this error."""
    if error.reason in _ABORT_REASONS:
        return "abort"
    is_failure = isinstance(error, EngineDeadError) or status_code(error.reason) is StatusCode.INTERNAL
    return "error" if is_admitted or is_failure else "rejected"
