"""The executor: what EngineCore may ask of the model side. Owner: the busy-loop thread.

Life: construct (loads the model) -> determine_num_blocks -> initialize_kv_cache -> warm_up -> steps -> shutdown.
A step is two calls, so that the bitmask of grammars can be made while the forward pass runs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.structured_output.bitmask import GrammarBitmask

# Called from any thread when the executor can not go on; the cause travels to every frontend.
FailureCallback = Callable[[BaseException], None]

# A worker that takes longer to answer a health check is unhealthy.
HEALTH_TIMEOUT_S = 10.0

# Types in which weights may be handed over, and the bytes of a value; each weight keeps its own type.
WEIGHT_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}


class ExecutorFailedError(Exception):
    """The executor can not go on."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a step computes and reads, as far as the sizes of the model tell; of all workers together."""

    # Elements of the matrices that a token of a step goes through, experts that it does not use left out.
    num_matrix_params: int = 0
    # Elements of the output matrix, for each token that is sampled.
    num_head_params: int = 0
    # Query heads x (size of a key + size of a value), summed over the layers.
    attention_width: int = 0
    # Of the weights that a step reads: always, and when it samples.
    layer_bytes: int = 0
    head_bytes: int = 0

    @classmethod
    def joined(cls, parts: Sequence[ModelWork], leader: ModelWork) -> ModelWork:
        """Of workers that share the layers out; the leader alone computes logits."""
        return cls(
            num_matrix_params=sum(part.num_matrix_params for part in parts),
            num_head_params=leader.num_head_params,
            attention_width=sum(part.attention_width for part in parts),
            layer_bytes=sum(part.layer_bytes for part in parts),
            head_bytes=leader.head_bytes,
        )


NO_WORK = ModelWork()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded model; nothing here is a wish."""

    architecture: str
    dtype: str
    vocab_size: int
    # What computes it, and with which kernels.
    implementation: str
    # Longest context the model was made for.
    max_position_embeddings: int
    num_layers: int
    # KV bytes of one token in the layers of one group, which is what a block holds for each of its tokens.
    kv_bytes_per_token: int
    weight_bytes: int
    # As many tokens of prompts as a step of decodes should take along on this device; 0 = as many as there are.
    prefill_tokens_beside_decodes: int = 0
    # Layers that share a block table, with one table for each group.
    kv_cache_groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(),)
    # False: all tokens of a prompt see each other, so that it must be computed in one step, and no part of it reused.
    is_causal: bool = True
    # Features of a hidden state behind the final norm, which is what vectors of prompts are made of.
    hidden_size: int = 0
    work: ModelWork = NO_WORK


class MemoryPart(enum.Enum):
    """Device memory that a sleep gives back."""

    # Kept on the host meanwhile.
    WEIGHTS = enum.auto()
    # Content is lost; the size stays.
    KV_CACHE = enum.auto()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What only a look at the device tells, in bytes; None = nobody can tell."""

    free_bytes: int | None = None
    # Most that was allocated at a time, by weights and KV cache too.
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """Answer of one worker to a health check; the message says what is wrong."""

    rank: int
    is_healthy: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One whole weight by value: row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray


class WorkerError(Exception):
    """A worker process failed or died. `cause_type` is the class of its exception; the message names the worker."""

    def __init__(self, message: str, cause_type: str = "WorkerError") -> None:
        super().__init__(message)
        self.cause_type = cause_type


class Executor(Protocol):
    """Runs the model for one engine core."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight: 2 lets the next step be planned while one runs. They run in order."""

    @property
    def can_change_weights(self) -> bool:
        """False: the four calls for new weights, `weight_shapes` to `discard_weights`, must not be made."""

    def determine_num_blocks(self, block_size: int) -> int:
        """Blocks that fit (null block included): profiled on a GPU, `--kv-cache-memory` on a CPU."""

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate the KV cache."""

    def warm_up(self) -> None:
        """Run the model once, so that the first request does not pay for lazy initialisation."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Start the forward pass; with concurrent batches it is not waited for. Its failure is told by the sampling."""

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        """Sample from the forward pass just started, within the bitmask. The future may be done already."""

    def execute_dummy_batch(self, num_tokens: int) -> None:
        """One forward pass without requests; between two steps."""

    def check_health(self) -> list[WorkerHealth]:
        """Ask every worker whether its device still works; one that does not answer within 10 s is unhealthy."""

    def device_memory(self) -> DeviceMemory:
        """A look at the device, from any thread and beside a step. Never fails: a device that is lost tells nothing."""

    def release_memory(self, part: MemoryPart) -> int:
        """Give device memory back, between two steps; returns the bytes. No step may run before it is restored."""

    def restore_memory(self, part: MemoryPart) -> None:
        """Take it again. What the workers know of the requests has stayed; after KV_CACHE all blocks are empty."""

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights by their names in the loaded module, whole, also while they are discarded; tied ones once."""

    def update_weights(self, tensors: list[WeightTensor]) -> None:
        """Overwrite these weights, which were checked; the others stay. A failure leaves them undefined."""

    def load_weights(self, directory: Path) -> int:
        """All weights from a checkpoint, over the old ones or after a discard; returns their bytes.

        Raises StartupError, and then nothing has changed; ExecutorFailedError when that can not be said.
        """

    def discard_weights(self) -> int:
        """Drop the weights, between two steps; returns the bytes. Nothing may run before `load_weights`."""

    def start_profile(self) -> None:
        """Record until `stop_profile`. The caller keeps them in turn."""

    def stop_profile(self, directory: Path, prefix: str) -> list[str]:
        """Write what was recorded, one file for each worker; returns their paths."""

    def shutdown(self) -> None:
        """Release everything; safe to call twice and on a half-built executor."""
