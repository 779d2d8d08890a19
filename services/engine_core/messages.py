"""What travels on the engine's queues: small frozen values, one class for each kind.

Input side: made by input threads, signals and monitors, read by the busy loop.
Output side: put by the busy loop and input threads, encoded by the session's output thread.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine_core.operations import Operation, OperationResult
from engine_core.scheduler.output import EngineCoreOutputs
from engine_core.scheduler.request import Request, RequestKey
from engine_core.scheduler.request_error import RequestError


@dataclass(frozen=True, slots=True)
class Add:
    """Preprocessed requests of one frame, in order."""

    requests: list[Request]


# Labels of the aborted counter: the names of AbortReason on the wire.
ABORT_REASONS = (
    "unspecified",
    "client_cancelled",
    "deadline",
    "stop_string",
    "slow_client",
    "shutdown",
    "frontend_error",
    "requested",
)


@dataclass(frozen=True, slots=True)
class Abort:
    """End these; unknown keys are ignored."""

    keys: list[RequestKey]
    reason: str


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """Run an operation between two steps; after the deadline its result is not wanted any more."""

    session_id: str
    call_id: int
    operation: Operation
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class PingStepLoop:
    """Prove that the loop turns."""

    session_id: str
    nonce: int
    client_monotonic_ns: int


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Look at the shutdown request, or at grammars that are done; carries nothing."""


@dataclass(frozen=True, slots=True)
class ExecutorFailure:
    """A worker can not go on; the loop raises it."""

    error: BaseException


InputMessage = Add | Abort | UtilityCall | PingStepLoop | WakeUp | ExecutorFailure


class DeathCause(enum.Enum):
    """Why the engine died; the names are those of EngineDeathCause on the wire."""

    STEP_FAILED = enum.auto()
    EXECUTOR_FAILED = enum.auto()
    OUT_OF_MEMORY = enum.auto()
    STEP_TIMEOUT = enum.auto()
    INVARIANT = enum.auto()
    INIT_FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class EngineCoreDead:
    """The ENGINE_CORE_DEAD signal: the last thing every stream carries."""

    cause: DeathCause
    cause_type: str
    message: str
    last_step: int
    report_id: str = ""


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to a ping; the state and the step are looked up when it is encoded."""

    nonce: int
    through_step_loop: bool
    client_monotonic_ns: int


@dataclass(frozen=True, slots=True)
class ShutdownNotice:
    """A drain has begun."""

    drain_remaining_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class UtilityResult:
    """The one answer of a UtilityCall."""

    call_id: int
    outcome: OperationResult | RequestError


OutputMessage = EngineCoreOutputs | Pong | ShutdownNotice | UtilityResult | EngineCoreDead
