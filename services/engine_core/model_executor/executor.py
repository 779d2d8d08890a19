"""The executor: what EngineCore may ask of the model side. Owner: the busy-loop thread.

Life: construct (loads the model) -> determine_num_blocks -> initialize_kv_cache -> warm_up -> steps -> shutdown.
A step is two calls, so that the bitmask of grammars can be made while the forward pass runs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.structured_output.bitmask import GrammarBitmask

# Called from any thread when the executor can not go on; the cause travels to every frontend.
FailureCallback = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded model; nothing here is a wish."""

    architecture: str
    dtype: str
    vocab_size: int
    # Longest context the model was made for.
    max_position_embeddings: int
    num_layers: int
    # KV bytes of one token over all layers.
    kv_bytes_per_token: int
    weight_bytes: int


class Executor(Protocol):
    """Runs the model for one engine core."""

    @property
    def model_info(self) -> ModelInfo: ...

    def determine_num_blocks(self, block_size: int) -> int:
        """Blocks that fit (null block included): profiled on a GPU, `--kv-cache-memory` on a CPU."""

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate the KV cache."""

    def warm_up(self) -> None:
        """Run the model once, so that the first request does not pay for lazy initialisation."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Start the forward pass; does not wait for it where the device allows."""

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        """Sample from the forward pass just started, within the bitmask. The future may be done already."""

    def check_health(self) -> None:
        """Raises when a worker can not answer."""

    def shutdown(self) -> None:
        """Release everything; safe to call twice and on a half-built executor."""
