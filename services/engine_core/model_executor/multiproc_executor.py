"""The executor that runs the model in several worker processes: tensor parallel, pipeline parallel, or both.

Owner: the busy-loop thread. Each worker holds an InProcessExecutor with its part of the model; what the engine asks
goes to all of them in the same order. The leader alone samples and answers a step.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from engine_core.config import EngineSettings
from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from engine_core.model_executor.executor import (
    HEALTH_TIMEOUT_S,
    DeviceMemory,
    ExecutorFailedError,
    FailureCallback,
    MemoryPart,
    ModelInfo,
    ModelWork,
    WeightTensor,
    WorkerError,
    WorkerHealth,
)
from engine_core.model_executor.host_memory import available_bytes
from engine_core.model_executor.in_process_executor import InProcessExecutor
from engine_core.model_executor.loader import choose_device
from engine_core.model_executor.model_cache import Progress
from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.parallel.worker_messages import WorkerStart
from engine_core.model_executor.parallel.worker_pool import WorkerPool
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.structured_output.bitmask import GrammarBitmask
from stepwire.errors import InvariantViolation

P = ParamSpec("P")
R = TypeVar("R")


class MultiprocExecutor:
    """Implements `Executor`. Construction loads the model; raises StartupError or WorkerError."""

    def __init__(
        self, settings: EngineSettings, model_path: Path, failure_callback: FailureCallback, progress: Progress
    ) -> None:
        self._settings = settings
        sizes = settings.tensor_parallel_size, settings.pipeline_parallel_size
        self._places = [Place(rank, *sizes) for rank in range(sizes[0] * sizes[1])]
        self._leader = self._places[0].leader
        self._followers = [place.rank for place in self._places if not place.is_leader]
        self._is_on_cpu = choose_device(settings).type == "cpu"
        self._pool = WorkerPool(failure_callback)
        progress(f"starting {len(self._places)} workers")
        try:
            with tempfile.TemporaryDirectory(prefix="stepwire-") as directory:
                rendezvous = Path(directory) / "rendezvous"
                starts = [WorkerStart(settings, model_path, place, rendezvous) for place in self._places]
                self._model_info = self._join(self._pool.start(starts))
        except BaseException:
            self._pool.kill()
            raise

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    @property
    def max_concurrent_batches(self) -> int:
        """One for each stage of a pipeline; the workers run them in order, so one more than runs may always be sent."""
        return max(self._settings.pipeline_parallel_size, 2 if self._settings.async_scheduling else 1)

    @property
    def can_change_weights(self) -> bool:
        """They would have to be cut again for every worker."""
        return False

    def determine_num_blocks(self, block_size: int) -> int:
        # The block tables are the same everywhere.
        return min(self._ask_all(InProcessExecutor.determine_num_blocks, block_size))

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        self._ask_all(InProcessExecutor.initialize_kv_cache, num_blocks, block_size)

    def warm_up(self) -> None:
        self._ask_all(InProcessExecutor.warm_up)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._pool.tell(range(len(self._places)), InProcessExecutor.execute_model, (scheduler_output,))

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        future = self._pool.call(self._leader, InProcessExecutor.sample_tokens, (bitmask,))
        self._pool.tell(self._followers, InProcessExecutor.sample_tokens, (None,))
        return future

    def execute_dummy_batch(self, num_tokens: int) -> None:
        try:
            self._ask_all(InProcessExecutor.execute_dummy_batch, num_tokens)
        except WorkerError as error:
            # The others hang in what they do together, or have done what this one has not: no step can follow.
            raise ExecutorFailedError(str(error)) from error

    def check_health(self) -> list[WorkerHealth]:
        futures = self._pool.call_all(InProcessExecutor.check_health, ())
        wait(futures, HEALTH_TIMEOUT_S)
        return [_health_of(rank, future) for rank, future in enumerate(futures)]

    def device_memory(self) -> DeviceMemory:
        # GPUs would have to be asked through their workers, which answer between two steps only.
        return DeviceMemory(free_bytes=available_bytes()) if self._is_on_cpu else DeviceMemory()

    def release_memory(self, part: MemoryPart) -> int:
        return sum(self._ask_all(InProcessExecutor.release_memory, part))

    def restore_memory(self, part: MemoryPart) -> None:
        self._ask_all(InProcessExecutor.restore_memory, part)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        raise _weights_are_fixed()

    def update_weights(self, tensors: list[WeightTensor]) -> None:
        raise _weights_are_fixed()

    def load_weights(self, directory: Path) -> int:
        raise _weights_are_fixed()

    def discard_weights(self) -> int:
        raise _weights_are_fixed()

    def start_profile(self) -> None:
        self._ask_all(InProcessExecutor.start_profile)

    def stop_profile(self, directory: Path, prefix: str) -> list[str]:
        paths = self._ask_all(InProcessExecutor.stop_profile, directory.absolute(), prefix)
        return [path for paths_of_worker in paths for path in paths_of_worker]

    def shutdown(self) -> None:
        self._pool.stop()

    def _ask_all(
        self, function: Callable[Concatenate[InProcessExecutor, P], R], *arguments: P.args, **keywords: P.kwargs
    ) -> list[R]:
        """The answers by rank; raises the first failure."""
        return self._pool.results(self._pool.call_all(function, arguments))

    def _join(self, parts: list[ModelInfo]) -> ModelInfo:
        """The whole model from what the workers say of their parts."""
        num_layers = sum(part.num_layers for part in parts) // self._settings.tensor_parallel_size
        groups = parts[self._leader].kv_cache_groups
        return dataclasses.replace(
            parts[self._leader],
            num_layers=num_layers,
            # Each stage of a pipeline has its part of one group.
            kv_cache_groups=groups if self._settings.pipeline_parallel_size == 1 else (KVCacheGroup(num_layers),),
            kv_bytes_per_token=sum(part.kv_bytes_per_token for part in parts),
            weight_bytes=sum(part.weight_bytes for part in parts),
            work=ModelWork.joined([part.work for part in parts], parts[self._leader].work),
        )


def _weights_are_fixed() -> InvariantViolation:
    return InvariantViolation("weights were to be changed although can_change_weights says no")


def _health_of(rank: int, future: Future[list[WorkerHealth]]) -> WorkerHealth:
    if not future.done():
        return WorkerHealth(rank, is_healthy=False, message=f"no answer within {HEALTH_TIMEOUT_S:.0f} s")
    error = future.exception()
    return future.result()[0] if error is None else WorkerHealth(rank, is_healthy=False, message=str(error))
