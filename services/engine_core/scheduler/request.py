"""One sequence as the scheduler sees it: what was asked, what is known, what is computed, and its state.

Owner: the busy-loop thread, once the request was added. Transitions are data; any other is an InvariantViolation.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_core.scheduler.grammar import Grammar, GrammarSpec
from engine_core.scheduler.pooling import PoolingParams
from stepwire.errors import InvariantViolation

# (session id, handle): a caller's request_id is for logs only and is never a key.
RequestKey = tuple[str, int]


class RequestStatus(enum.Enum):
    """States of a request; TRANSITIONS says which may follow which."""

    WAITING = enum.auto()
    WAITING_FOR_GRAMMAR = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()
    FINISHED_REPETITION = enum.auto()
    FINISHED_REJECTED = enum.auto()


FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED_"))

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: FINISHED | {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_GRAMMAR},
    RequestStatus.WAITING_FOR_GRAMMAR: FINISHED | {RequestStatus.WAITING},
    RequestStatus.RUNNING: FINISHED | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: FINISHED | {RequestStatus.RUNNING},
    **{status: frozenset() for status in FINISHED},
}


class EventType(enum.Enum):
    """What happened to a request."""

    QUEUED = enum.auto()
    SCHEDULED = enum.auto()
    PREEMPTED = enum.auto()
    # Scheduled again after a preemption.
    RESUMED = enum.auto()
    FIRST_TOKEN = enum.auto()


class RequestEvent(NamedTuple):
    """When it happened, in seconds of the engine's clock, and in numbers what a trace tells of it."""

    type: EventType
    time: float
    facts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, with every default resolved. Ranges are those of EngineSamplingParams."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    # (token id, bias)
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Empty = no restriction.
    allowed_token_ids: tuple[int, ...] = ()
    # Each variant of each bad word as tokens; none is empty.
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LogprobsParams:
    """Which log-probabilities are wanted: None = none, 0 = of the token itself, k = of the k most likely as well.

    -1 = of the whole vocabulary. `chosen_token_ids` are added to each output position, whatever their rank.
    """

    num_output: int | None = None
    num_prompt: int | None = None
    chosen_token_ids: tuple[int, ...] = ()

    @property
    def has_output(self) -> bool:
        return self.num_output is not None or bool(self.chosen_token_ids)


NO_LOGPROBS = LogprobsParams()


# The detector looks at every pattern length after every token, on the step loop.
MAX_PATTERN_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """Ends a generation whose tail is one pattern of min..max tokens, `min_repeats` times in a row."""

    max_pattern_tokens: int
    min_pattern_tokens: int
    min_repeats: int


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When generation ends. `eos_token_ids` are masked below `min_tokens` even with `ignore_eos`."""

    # 0 = with the prompt: nothing is sampled.
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    repetition: RepetitionDetection | None = None


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of one sequence. Times are seconds of the engine's monotonic clock."""

    key: RequestKey
    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop: StopConditions
    arrival_time: float
    deadline: float | None = None
    queue_deadline: float | None = None
    # Lower is served first. Asked for; from the queue on what the policy and the caller's class allow.
    priority: int = 0
    # Whose share of the engine it uses; empty = that of its session.
    client_class: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    logprobs: LogprobsParams = NO_LOGPROBS
    grammar_spec: GrammarSpec | None = None
    # Set: a vector of the prompt is the whole answer, and max_tokens is 0.
    pooling: PoolingParams | None = None
    # Starts with the tokens of a resumed generation; they count as output but are never sent back.
    output_token_ids: list[int] = field(default_factory=list)

    status: RequestStatus = RequestStatus.WAITING
    # Running number in the scheduler, set when it is queued: breaks every tie.
    order: int = 0
    # Set by the input thread when there is a grammar_spec.
    grammar: Grammar | None = None
    # Tokens whose KV is in the cache, or will be when the steps in flight are done.
    num_computed_tokens: int = 0
    # Output tokens that steps in flight will bring: planned with, but not known yet.
    num_in_flight_tokens: int = 0
    # The oldest and the newest step that computes for this request; 0 = none does.
    first_step: int = 0
    last_step: int = 0
    num_preemptions: int = 0
    # Tokens that were computed when it was preempted last.
    num_lost_tokens: int = 0
    queued_time: float = 0.0
    # The first scheduling, the first token, the newest token.
    scheduled_time: float = 0.0
    first_token_time: float | None = None
    last_token_time: float = 0.0
    # Hashes of the full blocks of the known tokens; a prefix is computed by the input thread.
    block_hashes: list[bytes] = field(default_factory=list)
    # Known tokens that the prefix cache held when it came: what it will be spared, as far as that can be told; 0 again
    # from a preemption on.
    num_cached_at_arrival: int = 0
    # Prompt tokens found in the prefix cache; set at the first scheduling.
    num_cached_tokens: int | None = None
    stop_token_id: int | None = None
    # Prompt positions whose log-probabilities were sent; a recompute after a preemption brings them again.
    num_prompt_logprobs: int = 0
    # Not told to the frontend yet; they travel with the next output.
    events: list[RequestEvent] = field(default_factory=list)
    # The model has computed NaN for it.
    is_corrupted: bool = False
    # Of the trace that it is a part of, for logs; empty = of none.
    trace_id: str = ""
    # Output tokens this request came with.
    num_resumed_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_resumed_tokens = len(self.output_token_ids)

    @property
    def log_fields(self) -> dict[str, str]:
        """What every line about it carries."""
        return {"request_id": self.request_id, **({"trace_id": self.trace_id} if self.trace_id else {})}

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_uncached_tokens(self) -> int:
        """Known tokens that will have to be computed, as far as its arrival told."""
        return self.num_tokens - self.num_cached_at_arrival

    def was_in(self, step: int) -> bool:
        """Whether a step that computes for this key can have been planned for this request."""
        return 0 < self.first_step <= step

    @property
    def num_tokens_in_sight(self) -> int:
        """Known tokens, and those that steps in flight will bring."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight_tokens

    @property
    def is_decoding(self) -> bool:
        """The next step computes one token of it, the last in sight."""
        return self.num_tokens_in_sight - self.num_computed_tokens == 1

    def must_wait_for_token(self, max_model_len: int) -> bool:
        """The tokens in flight end the request for certain, or decide which ones may follow."""
        if not self.num_in_flight_tokens:
            return False
        num_output = len(self.output_token_ids) + self.num_in_flight_tokens
        is_full = num_output >= self.stop.max_tokens or len(self.prompt_token_ids) + num_output >= max_model_len
        return is_full or self.grammar is not None

    @property
    def max_num_tokens(self) -> int:
        """Most tokens this request can ever hold."""
        return len(self.prompt_token_ids) + self.stop.max_tokens

    @property
    def was_scheduled(self) -> bool:
        """The workers know this request."""
        return self.num_cached_tokens is not None

    @property
    def fairness_key(self) -> str:
        return self.client_class or self.key[0]

    @property
    def needs_whole_prompt(self) -> bool:
        """Log-probabilities of the prompt or hidden states are to come: what is read from the prefix cache has none."""
        if self.pooling is not None:
            return self.pooling.needs_all_tokens
        return self.logprobs.num_prompt is not None and self.num_prompt_logprobs < len(self.prompt_token_ids) - 1

    def token_ids(self, start: int, end: int) -> list[int]:
        """Known tokens of positions [start, end)."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]

    def note_event(self, event: EventType, now: float, step: int, **facts: int) -> None:
        """It happened while this step was planned or taken in."""
        self.events.append(RequestEvent(event, now, {"step": step, **facts}))

    def note_preempted(self, now: float, step: int) -> None:
        """Nothing of it is computed any more."""
        self.num_lost_tokens, self.num_computed_tokens = self.num_computed_tokens, 0
        self.num_cached_at_arrival = 0
        self.num_preemptions += 1
        self.note_event(EventType.PREEMPTED, now, step, computed_tokens_lost=self.num_lost_tokens)

    def set_status(self, status: RequestStatus) -> None:
        if status not in TRANSITIONS[self.status]:
            raise InvariantViolation(f"request {self.key}: {self.status.name} -> {status.name} is not a transition")
        self.status = status
