"""Utility operations as the step loop sees them: one frozen pair of call and result for each, free of protobuf.

`utility_wire` makes the calls and encodes the results; `utilities` has one handler for each call.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine_core import weight_operations as weights
from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from engine_core.model_executor.executor import WorkerHealth
from engine_core.scheduler.request import RequestKey


class PauseMode(enum.Enum):
    """What happens to the requests that are in the engine; the names are those of the wire."""

    # All end as aborted, and their outputs are delivered.
    ABORT = enum.auto()
    # Those that were scheduled go on to their end; the others are held.
    WAIT = enum.auto()
    # All are frozen where they are.
    KEEP = enum.auto()


class SleepLevel(enum.Enum):
    """How much a sleep gives back; the names are those of the wire."""

    PAUSE_ONLY = enum.auto()
    OFFLOAD_WEIGHTS = enum.auto()
    DISCARD_ALL = enum.auto()


class WakeTag(enum.Enum):
    """A part of the engine that can sleep; the names are those of the wire."""

    WEIGHTS = enum.auto()
    KV_CACHE = enum.auto()
    SCHEDULING = enum.auto()


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all cached content."""

    # Preempt first, so that no block has a user.
    reset_running_requests: bool = False


@dataclass(frozen=True, slots=True)
class ResetPrefixCacheResult:
    """False = blocks were in use and nothing was changed."""

    is_reset: bool
    num_used_blocks: int


@dataclass(frozen=True, slots=True)
class ResetEncoderCache:
    """Forget processed inputs of other kinds than text."""


@dataclass(frozen=True, slots=True)
class ResetEncoderCacheResult:
    """There are none."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop scheduling."""

    mode: PauseMode
    # Afterwards reset the prefix cache, with running requests.
    clear_cache: bool = False


@dataclass(frozen=True, slots=True)
class PauseResult:
    """The engine is idle in the sense of the mode."""

    num_aborted: int
    num_held: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Schedule again."""


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """False = it was not paused."""

    is_resumed: bool


@dataclass(frozen=True, slots=True)
class IsPaused:
    """Ask for the pause state."""


@dataclass(frozen=True, slots=True)
class IsPausedResult:
    """Mode in force, also while the pause is pending; None = not paused."""

    mode: PauseMode | None
    is_pending: bool


@dataclass(frozen=True, slots=True)
class Sleep:
    """Pause, then give memory back. Without a mode the engine must be paused already."""

    level: SleepLevel
    pause_mode: PauseMode | None = None


@dataclass(frozen=True, slots=True)
class SleepResult:
    """The engine sleeps."""

    freed_bytes: int


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Bring parts back; no tags = all."""

    tags: frozenset[WakeTag] = frozenset()


@dataclass(frozen=True, slots=True)
class WakeUpResult:
    """What still sleeps."""

    still_asleep: frozenset[WakeTag]


@dataclass(frozen=True, slots=True)
class IsSleeping:
    """Ask for the sleep state."""


@dataclass(frozen=True, slots=True)
class IsSleepingResult:
    """None = awake."""

    level: SleepLevel | None
    asleep: frozenset[WakeTag]


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Record what the device and the loop do; `num_steps` 0 = until StopProfile."""

    num_steps: int = 0
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class StartProfileResult:
    """A profile is running."""

    output_dir: str


@dataclass(frozen=True, slots=True)
class StopProfile:
    """Write the profile."""


@dataclass(frozen=True, slots=True)
class StopProfileResult:
    """Where it lies."""

    files: list[str]


@dataclass(frozen=True, slots=True)
class DumpState:
    """Describe the engine between two steps."""

    include_requests: bool = False
    include_stacks: bool = False


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
class CheckHealth:
    """Ask every worker."""


@dataclass(frozen=True, slots=True)
class CheckHealthResult:
    """One entry for each worker."""

    workers: list[WorkerHealth]


@dataclass(frozen=True, slots=True)
class GetSupportedTasks:
    """Ask for the tasks of the model."""


@dataclass(frozen=True, slots=True)
class GetSupportedTasksResult:
    """Fixed for the life of the engine."""

    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GetKVCacheMetadata:
    """Ask how the KV cache is laid out."""


@dataclass(frozen=True, slots=True)
class GetKVCacheMetadataResult:
    """The number of blocks includes the null block."""

    block_size: int
    num_blocks: int
    groups: tuple[KVCacheGroup, ...]


@dataclass(frozen=True, slots=True)
class ExecuteDummyBatch:
    """One forward pass without requests."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class ExecuteDummyBatchResult:
    """The pass has run."""

    duration_s: float


@dataclass(frozen=True, slots=True)
class Drain:
    """Shut down as on a first SIGTERM. No timeout = the configured one."""

    timeout_s: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class DrainResult:
    """The drain has begun."""

    num_requests: int


Operation = (
    ResetPrefixCache
    | Pause
    | Resume
    | IsPaused
    | Sleep
    | WakeUp
    | IsSleeping
    | StartProfile
    | StopProfile
    | DumpState
    | CheckHealth
    | GetSupportedTasks
    | GetKVCacheMetadata
    | ExecuteDummyBatch
    | Drain
    | ResetEncoderCache
    | weights.ReloadWeights
    | weights.StartWeightUpdate
    | weights.UpdateWeights
    | weights.FinishWeightUpdate
    | weights.GetWeightVersion
)
OperationResult = (
    ResetPrefixCacheResult
    | PauseResult
    | ResumeResult
    | IsPausedResult
    | SleepResult
    | WakeUpResult
    | IsSleepingResult
    | StartProfileResult
    | StopProfileResult
    | StateDump
    | CheckHealthResult
    | GetSupportedTasksResult
    | GetKVCacheMetadataResult
    | ExecuteDummyBatchResult
    | DrainResult
    | ResetEncoderCacheResult
    | weights.ReloadWeightsResult
    | weights.StartWeightUpdateResult
    | weights.UpdateWeightsResult
    | weights.FinishWeightUpdateResult
    | weights.GetWeightVersionResult
)
