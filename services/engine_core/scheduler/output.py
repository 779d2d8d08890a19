"""The hand-offs of a step: SchedulerOutput to the workers, ModelRunnerOutput back, EngineCoreOutputs to a session.

Values, not live objects: whoever holds one may keep it while the scheduler goes on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine_core.kv_cache.kv_cache_manager import BlockIds
from engine_core.scheduler.pooling import PoolingParams
from engine_core.scheduler.request import (
    NO_LOGPROBS,
    LogprobsParams,
    Request,
    RequestEvent,
    RequestKey,
    RequestStatus,
    SamplingParams,
)
from engine_core.scheduler.request_error import RequestError
from stepwire.packed_logprobs import PackedLogprobs


class FinishReason(enum.Enum):
    """Why a request is over."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ABORTED = enum.auto()
    # Failed alone; the engine lives.
    ERROR = enum.auto()
    # Never scheduled: safe to send to another engine.
    REJECTED = enum.auto()
    REPETITION = enum.auto()


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORTED,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
    RequestStatus.FINISHED_REJECTED: FinishReason.REJECTED,
}


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """Everything a worker must know about a request it sees for the first time."""

    key: RequestKey
    prompt_token_ids: list[int]
    # Output known before the first scheduling: the tokens of a resumed generation.
    output_token_ids: list[int]
    sampling: SamplingParams
    # Ids masked while fewer than min_tokens tokens were generated: stop ids and eos ids.
    min_tokens: int
    min_tokens_masked_ids: tuple[int, ...]
    # The request's block tables, one for each group of layers, in order of position; 0 where nobody looks any more.
    block_ids: BlockIds
    # Tokens whose KV is in those blocks already (prefix hit).
    num_computed_tokens: int
    logprobs: LogprobsParams = NO_LOGPROBS
    # Set: pools and never samples.
    pooling: PoolingParams | None = None

    @classmethod
    def of(cls, request: Request, block_ids: BlockIds) -> NewRequestData:
        """The request as it is now; `block_ids` hold its first `num_computed_tokens` tokens already."""
        return cls(
            key=request.key,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=list(request.output_token_ids),
            sampling=request.sampling,
            min_tokens=request.stop.min_tokens,
            min_tokens_masked_ids=tuple(sorted(request.stop.eos_token_ids | request.stop.stop_token_ids)),
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            logprobs=request.logprobs,
            pooling=request.pooling,
        )


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """New blocks of a request the workers know. `is_resumed`: they replace the block tables."""

    key: RequestKey
    # As many for each group of layers.
    new_block_ids: BlockIds
    num_computed_tokens: int
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work. The workers sample a token for each request whose known tokens are all computed by it.

    Of a request that pools they make its vector instead.
    """

    step: int
    new_requests: list[NewRequestData]
    # Of the known requests those with new blocks. The others are in `num_scheduled_tokens` alone: the workers count
    # the computed tokens themselves.
    cached_requests: list[CachedRequestData]
    # Tokens to compute in this step, > 0 for each scheduled request, in batch order.
    num_scheduled_tokens: dict[RequestKey, int]
    total_num_scheduled_tokens: int
    # Requests that ended since the last step: the workers drop their state.
    finished_keys: list[RequestKey]
    # Scheduled requests that sample in this step under a grammar: sampling needs a mask for each.
    grammar_keys: list[RequestKey] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing in it for the workers."""
        return not self.num_scheduled_tokens and not self.finished_keys


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities a step brought for a prompt: row i is about prompt token `start` + i + 1.

    The first prompt token has none, because nothing precedes it.
    """

    start: int
    rows: PackedLogprobs


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Parallel lists in batch order. An empty list = nothing was sampled: a partial prefill, or one that is pooled."""

    keys: list[RequestKey]
    sampled_token_ids: list[list[int]]
    # Of those that asked: one row for each sampled token, and of the prompt tokens computed.
    logprobs: dict[RequestKey, PackedLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[RequestKey, PromptLogprobs] = field(default_factory=dict)
    # Of those that pool and whose prompts are complete: float32, little-endian.
    pooled: dict[RequestKey, bytes] = field(default_factory=dict)
    # Of those that sampled: whose logits had NaN. Looked for on demand.
    nan_keys: list[RequestKey] = field(default_factory=list)


GRAMMAR_VIOLATION = RequestError("GRAMMAR_VIOLATION", "the model chose a token that the grammar does not allow")


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request; exactly one for each."""

    reason: FinishReason
    stop_token_id: int | None = None
    error: RequestError | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class PrefillStats:
    """Where the prompt's KV came from, at the first scheduling."""

    num_prompt_tokens: int
    num_cached_tokens: int

    @classmethod
    def of(cls, request: Request) -> PrefillStats:
        return cls(request.num_prompt_tokens, request.num_cached_tokens or 0)


@dataclass(slots=True)
class EngineCoreOutput:
    """News of one request: exists only with new tokens, log-probabilities of its prompt, events or a finish.

    A vector comes with the finish.
    """

    key: RequestKey
    new_token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None
    # (event, seconds of the engine's monotonic clock)
    events: list[RequestEvent] = field(default_factory=list)
    prefill: PrefillStats | None = None
    # One row for each new token.
    logprobs: PackedLogprobs | None = None
    # The next rows of the prompt; over all outputs of a request each row comes once, in order.
    prompt_logprobs: PackedLogprobs | None = None
    # The answer to a request that pools: float32, little-endian.
    pooled: bytes | None = None

    @property
    def is_plain_token(self) -> bool:
        """One token and nothing else: travels in the parallel arrays of the frame."""
        has_more = self.finish or self.events or self.prefill or self.logprobs or self.prompt_logprobs
        return len(self.new_token_ids) == 1 and not has_more


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Snapshot of the scheduler. Counters grow from the engine's start."""

    num_running: int = 0
    num_waiting: int = 0
    # Of the waiting ones: held back by a grammar.
    num_waiting_deferred: int = 0
    # Those of them that the prefix cache did not hold when their requests came.
    num_waiting_tokens: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_total_blocks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preempted_query_tokens: int = 0
    preempted_hit_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    # Of these: found in the prefix cache.
    num_cached_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    # Requests whose logits had NaN at least once; counted on demand.
    num_corrupted: int = 0
    # Cached blocks handed out again.
    num_evictions: int = 0
    # Hits whose stored tokens differed.
    num_collisions: int = 0
    oldest_waiting_time: float | None = None
    # Put in by the loop when it goes out: the scheduler knows no weights.
    weight_version: str = ""


@dataclass(slots=True)
class EngineCoreOutputs:
    """Everything one step produced for one session."""

    step: int
    time: float
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    stats: SchedulerStats | None = None
