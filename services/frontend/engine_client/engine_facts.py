"""What the frontend knows of an engine, free of protobuf: the facts of its Ready and its latest load. Frozen values."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stepwire.packed_logprobs import WHOLE_VOCABULARY


class EngineState(enum.Enum):
    """Life cycle of an engine as it reports it; the values are those of the wire."""

    UNSPECIFIED = 0
    STARTING = 1
    WARMING_UP = 2
    RUNNING = 3
    PAUSED = 4
    SLEEPING = 5
    DRAINING = 6
    STALLED = 7
    DEAD = 8

    @property
    def is_serving(self) -> bool:
        """Whether new requests may go there: a paused engine holds them, it does not refuse."""
        return self in (EngineState.RUNNING, EngineState.PAUSED)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine resolved at its start; valid for one boot of it, but for the version of its weights."""

    engine_id: str
    boot_id: str
    model: str
    revision: str
    tokenizer_sha256: str
    max_model_len: int
    vocab_size: int
    architecture: str
    dtype: str
    block_size: int
    kv_cache_tokens: int
    max_num_seqs: int
    # -1 = the whole vocabulary
    max_logprobs: int
    version: str
    weight_version: str
    ping_interval_s: float
    ping_timeout_s: float
    state: EngineState
    # Kinds of constraints it can enforce.
    structured_output_kinds: tuple[str, ...] = ()
    # Its place among its replicas, by which callers may pin a request.
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    # It serves by priority.
    has_priorities: bool = False
    # Length of its vectors of prompts, and how they are made; 0 and empty = it makes none.
    embedding_dimensions: int = 0
    pooling: str = ""
    # It shows what happens to requests in spans of its own, wherever their trace is kept.
    is_tracing: bool = False
    # Of its KV cache, the null block included.
    num_blocks: int = 0

    @property
    def boot(self) -> tuple[str, str]:
        """This life of this engine, whatever address it is reached at."""
        return (self.engine_id, self.boot_id)

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """Engines of one pool must agree on this, or equal requests would get different answers."""
        return (self.model, self.revision, self.tokenizer_sha256, self.weight_version)

    @property
    def text_identity(self) -> tuple[str, str, str]:
        """What a prepared request depends on: weights may change under it, its tokens stay right."""
        return (self.model, self.revision, self.tokenizer_sha256)

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints and seeds give equal output: everything that decides the numbers is in it."""
        parts = (self.model, self.revision, self.dtype, self.version, self.weight_version)
        return "sw-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def strictest(facts: EngineFacts, others: Sequence[EngineFacts]) -> EngineFacts:
    """`facts` with the limits that hold on every engine, so that a request valid for one is valid for all."""
    every = [facts, *others]
    return replace(
        facts,
        max_model_len=min(one.max_model_len for one in every),
        kv_cache_tokens=min(one.kv_cache_tokens for one in every),
        # All who set a limit have one of at least 0.
        max_logprobs=min((one.max_logprobs for one in every if one.max_logprobs >= 0), default=WHOLE_VOCABULARY),
        has_priorities=all(one.has_priorities for one in every),
        embedding_dimensions=min(one.embedding_dimensions for one in every),
        structured_output_kinds=tuple(
            kind for kind in facts.structured_output_kinds if all(kind in one.structured_output_kinds for one in others)
        ),
    )


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The part of SchedulerStats that picking an engine needs, here or by somebody who scrapes us or asks for it."""

    running: int = 0
    waiting: int = 0
    # Frontends that send it requests, this one included.
    num_frontends: int = 1
    # Known tokens of the requests that wait, without those that were cached when they came.
    waiting_tokens: int = 0
    # Of the waiting ones: held back by a grammar.
    waiting_deferred: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that requests refer to, 0 to 1."""
        return self.kv_blocks_used / max(1, self.kv_blocks_total)
