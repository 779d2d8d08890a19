"""From an exception to the cause every frontend is told."""

from __future__ import annotations

from engine_core.core import StepError
from engine_core.messages import DeathCause, EngineCoreDead
from engine_core.model_executor.executor import ExecutorFailedError, WorkerError
from stepwire.errors import EngineDeadError, InvariantViolation

# Long enough for any message of ours, short enough to fit a status.
_MAX_MESSAGE_CHARS = 1000


def describe_death(error: BaseException, last_step: int) -> EngineCoreDead:
    """The ENGINE_CORE_DEAD of an exception that left the busy loop."""
    root = error.cause if isinstance(error, StepError) else error
    if isinstance(root, ExecutorFailedError) and root.__cause__ is not None:
        root = root.__cause__
    return EngineCoreDead(
        cause=_cause_of(error, root),
        cause_type=_type_name(root),
        message=str(root)[:_MAX_MESSAGE_CHARS],
        last_step=last_step,
        report_id=error.report_id if isinstance(error, StepError) else "",
    )


def start_failure(error: BaseException) -> EngineCoreDead:
    """What frontends that wait for the start are told when it fails."""
    return EngineCoreDead(DeathCause.INIT_FAILED, _type_name(error), str(error)[:_MAX_MESSAGE_CHARS], last_step=0)


def _type_name(error: BaseException) -> str:
    """What a worker failed with is worth more than that it was a worker."""
    return error.cause_type if isinstance(error, WorkerError) else type(error).__name__


def as_error(dead: EngineCoreDead) -> EngineDeadError:
    """The death as the status of an RPC, for those who have no stream that carries the frame."""
    what = "could not start" if dead.cause is DeathCause.INIT_FAILED else "died"
    text = f"the engine {what}: {dead.message}"
    return EngineDeadError(
        text, kind="reported", cause=dead.cause.name, cause_type=dead.cause_type, last_step=dead.last_step
    )


def _cause_of(error: BaseException, root: BaseException) -> DeathCause:
    # By name: torch's OutOfMemoryError can not be imported outside the model executor, and workers send names.
    name = _type_name(root)
    if isinstance(root, MemoryError) or name in ("MemoryError", "OutOfMemoryError"):
        return DeathCause.OUT_OF_MEMORY
    if name == InvariantViolation.__name__:
        return DeathCause.INVARIANT
    if isinstance(error, ExecutorFailedError) or isinstance(root, WorkerError):
        return DeathCause.EXECUTOR_FAILED
    return DeathCause.STEP_FAILED
