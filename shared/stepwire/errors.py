"""Errors by whose fault they are. Each carries a reason; `grpc_errors` maps reasons to statuses in one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: its path in the proto message, and what is wrong with which value and limit."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """A limit of one caller that is used up: whose, and which."""

    subject: str
    description: str


class StepwireError(Exception):
    """A failure with a machine-readable reason. The message is for people and never holds prompt text."""

    default_reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_ms: int = 0,
        retryable: bool | None = None,
        metadata: dict[str, str] | None = None,
        quota: tuple[QuotaViolation, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.violations = violations
        self.retry_after_ms = retry_after_ms
        # None = whatever the reason's row of the table says.
        self.retryable = retryable
        self.metadata = metadata or {}
        self.quota = quota


class InvalidRequestError(StepwireError):
    """The caller's fault: refused before the engine sees it."""

    default_reason = "FIELD_INVALID"

    @classmethod
    def of_field(cls, field: str, description: str, *, reason: str | None = None) -> InvalidRequestError:
        """One wrong field; the message repeats the field so that clients that drop details still see it."""
        return cls(f"{field}: {description}", reason=reason, violations=(FieldViolation(field, description),))


class AccessError(StepwireError):
    """The caller has no good token, or may not do this with it."""

    default_reason = "UNAUTHENTICATED"


class OverloadedError(StepwireError):
    """No room now; the same request may succeed after `retry_after_ms`."""

    default_reason = "QUEUE_FULL"


class UnavailableError(StepwireError):
    """No engine can serve now: starting, draining, away."""

    default_reason = "ENGINE_STARTING"


class EngineDeadError(UnavailableError):
    """The engine that ran this request is gone.

    `kind` is how the frontend learned of it: reported (EngineDead frame), transport (stream broke) or heartbeat.
    """

    default_reason = "ENGINE_DEAD"

    def __init__(
        self,
        message: str,
        *,
        kind: str = "transport",
        cause: str = "",
        cause_type: str = "",
        boot_id: str = "",
        last_step: int = 0,
        report_id: str = "",
    ) -> None:
        super().__init__(message, metadata={"kind": kind, "cause": cause, "cause_type": cause_type, "boot_id": boot_id})
        self.kind = kind
        self.cause = cause
        self.cause_type = cause_type
        self.boot_id = boot_id
        self.last_step = last_step
        self.report_id = report_id


class RequestFailedError(StepwireError):
    """Our fault, one request only; engine and frontend live on."""

    default_reason = "REQUEST_FAILED"


class InvariantViolation(Exception):
    """Our fault, and the state can no longer be trusted: the engine dies of it with cause INVARIANT."""
