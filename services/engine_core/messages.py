"""What travels on the engine's queues: small frozen values, one class for each kind.

Input side: made by input threads, signals and monitors, read by the busy loop.
Output side: put by the busy loop and input threads, encoded by the session's output thread.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine_core.scheduler.output import EngineCoreOutputs, RequestError
from engine_core.scheduler.request import Request, RequestKey


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
class DumpState:
    """Describe the engine between two steps."""

    session_id: str
    call_id: int
    include_requests: bool
    include_stacks: bool


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


InputMessage = Add | Abort | DumpState | PingStepLoop | WakeUp | ExecutorFailure


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
class RequestState:
    """One request as the scheduler sees it; counts only."""

    request_id: str
    key: RequestKey
    status: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    age_s: float


@dataclass(frozen=True, slots=True)
class StateDump:
    """Answer to DumpState."""

    call_id: int
    step: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_total_blocks: int
    violations: list[str]
    requests: list[RequestState]
    # Of all threads; empty unless asked for.
    thread_stacks: str
    input_queue_depth: int
    output_queue_depth: int
    aborts_queue_depth: int


@dataclass(frozen=True, slots=True)
class UtilityFailure:
    """A utility call that could not be answered."""

    call_id: int
    error: RequestError


OutputMessage = EngineCoreOutputs | Pong | ShutdownNotice | StateDump | UtilityFailure | EngineCoreDead
