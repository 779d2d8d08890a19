"""The executor that runs the model in the engine core's own process, or one worker's part of it in the worker's.

Owner: the busy-loop thread, or the main thread of the worker. With asynchronous scheduling everything that touches the
device runs in one thread of its own, in order; else, and in a worker, in the caller's. Every failure surfaces in the
call that waits for the work, so the failure callback of executors with workers has no use.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future
from pathlib import Path

import torch

from engine_core.config import EngineSettings
from engine_core.model_executor.decode_graphs import decode_graphs_for
from engine_core.model_executor.device_thread import DeviceThread
from engine_core.model_executor.executor import (
    HEALTH_TIMEOUT_S,
    DeviceMemory,
    MemoryPart,
    ModelInfo,
    WeightTensor,
    WorkerHealth,
)
from engine_core.model_executor.host_memory import available_bytes, return_freed_memory
from engine_core.model_executor.kernels.choice import choose_kernels
from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.kv_cache_size import determine_num_blocks
from engine_core.model_executor.loader import LoadedModel, load_model
from engine_core.model_executor.model_cache import Progress
from engine_core.model_executor.model_runner import ModelRunner
from engine_core.model_executor.models.backend import ModelBackend
from engine_core.model_executor.models.choice import choose_backend
from engine_core.model_executor.models.support import context_limit
from engine_core.model_executor.models.work import Matrices, work_of
from engine_core.model_executor.parallel.ranked_runner import make_runner
from engine_core.model_executor.parallel.worker_group import WorkerGroup
from engine_core.model_executor.prefill_part import measure_prefill_part
from engine_core.model_executor.profiler import TorchProfiler
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.structured_output.bitmask import GrammarBitmask
from stepwire.errors import InvariantViolation

_WARM_UP_TOKENS = 16
# Workers on CPUs do not measure it: they would have to do so in step.
_PREFILL_PART_OF_WORKERS = 32


class InProcessExecutor:
    """Implements `Executor`. Construction loads the model; raises StartupError."""

    def __init__(
        self, settings: EngineSettings, model_path: Path, progress: Progress, group: WorkerGroup | None = None
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._group = group
        self._rank = 0 if group is None else group.place.rank
        if settings.num_threads:
            # Holds for every thread that comes to do math, the device thread too.
            torch.set_num_threads(settings.num_threads)
        loaded = load_model(settings, model_path, progress, group)
        matrices = Matrices.of(loaded)
        self._device = loaded.device
        self._device_thread = DeviceThread(has_thread=settings.async_scheduling and group is None)
        self._profiler = TorchProfiler()
        kernels = choose_kernels(settings, loaded.device, loaded.dtype)
        backend = choose_backend(settings, loaded, kernels, group)
        self._runner: ModelRunner | None = make_runner(backend, loaded, settings.max_num_seqs, kernels, group)
        self._runner.graphs = decode_graphs_for(settings, loaded, backend, kernels, group)
        self._runner.checks_nan = settings.check_nan
        return_freed_memory()
        self._model_info = _describe(settings, loaded, backend, kernels, self._runner, matrices)
        if loaded.device.type == "cpu":
            prefill_part = self._measure_prefill_part() if group is None else _PREFILL_PART_OF_WORKERS
            self._model_info = dataclasses.replace(self._model_info, prefill_tokens_beside_decodes=prefill_part)
        # The forward pass that is to be sampled from next.
        self._forward: Future[None] | None = None

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    @property
    def max_concurrent_batches(self) -> int:
        return 2 if self._settings.async_scheduling else 1

    @property
    def can_change_weights(self) -> bool:
        return True

    def determine_num_blocks(self, block_size: int) -> int:
        block_bytes = self._model_info.kv_bytes_per_token * block_size
        if self._device.type == "cpu":
            # All workers take from the same memory.
            block_bytes *= self._settings.tensor_parallel_size * self._settings.pipeline_parallel_size
        return determine_num_blocks(
            self._settings,
            block_bytes,
            self._device,
            lambda: self._run_largest_step(block_size),
            lambda: self._device_thread.run(self._running().record_graphs, block_size, self._progress),
            self._running().drop_graphs,
        )

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        self._device_thread.run(self._running().initialize_kv_cache, num_blocks, block_size)

    def warm_up(self) -> None:
        self._progress("warming up")
        # One prefill and one decode in a step: both paths.
        self._device_thread.run(self._running().run_dummy_step, [_WARM_UP_TOKENS, 1], self._settings.block_size)
        self._device_thread.run(self._running().record_graphs, self._settings.block_size, self._progress)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._forward = self._device_thread.submit(self._running().execute_model, scheduler_output)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        return self._device_thread.submit(self._sample, self._running(), self._forward, bitmask)

    @staticmethod
    def _sample(runner: ModelRunner, forward: Future[None] | None, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        if forward is not None:
            # Done already, because work runs in order; what it failed with is the failure of the step.
            forward.result()
        return runner.sample_tokens(bitmask)

    def execute_dummy_batch(self, num_tokens: int) -> None:
        query_lens = self._sequences_of(num_tokens)
        self._device_thread.run(self._running().run_dummy_step, query_lens, self._settings.block_size)

    def check_health(self) -> list[WorkerHealth]:
        self._running()
        try:
            # Reads back from the device: one that is lost fails here.
            self._device_thread.submit(lambda: torch.ones(1, device=self._device).item()).result(HEALTH_TIMEOUT_S)
        except TimeoutError:
            return [WorkerHealth(0, is_healthy=False, message=f"no answer within {HEALTH_TIMEOUT_S:.0f} s")]
        except Exception as error:
            return [WorkerHealth(self._rank, is_healthy=False, message=f"{type(error).__name__}: {error}")]
        return [WorkerHealth(self._rank, is_healthy=True)]

    def device_memory(self) -> DeviceMemory:
        if self._device.type == "cpu":
            return DeviceMemory(free_bytes=available_bytes())
        try:
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            return DeviceMemory(free_bytes, torch.cuda.max_memory_allocated(self._device))
        except RuntimeError:
            return DeviceMemory()

    def release_memory(self, part: MemoryPart) -> int:
        if part is MemoryPart.KV_CACHE:
            freed_bytes = self._device_thread.run(self._running().release_kv_cache)
        else:
            freed_bytes = self._device_thread.run(self._running().move_weights, torch.device("cpu"))
        self._empty_cache()
        return freed_bytes

    def restore_memory(self, part: MemoryPart) -> None:
        if part is MemoryPart.KV_CACHE:
            self._device_thread.run(self._running().restore_kv_cache)
        else:
            self._device_thread.run(self._running().move_weights, self._device)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._running().weights.shapes

    def update_weights(self, tensors: list[WeightTensor]) -> None:
        self._device_thread.run(self._running().drop_graphs)
        self._device_thread.run(self._running().weights.update, tensors)

    def load_weights(self, directory: Path) -> int:
        self._device_thread.run(self._running().drop_graphs)
        num_bytes = self._device_thread.run(self._running().weights.load, directory)
        self._empty_cache()
        return num_bytes

    def discard_weights(self) -> int:
        self._device_thread.run(self._running().drop_graphs)
        freed_bytes = self._device_thread.run(self._running().weights.discard)
        self._empty_cache()
        return freed_bytes

    def start_profile(self) -> None:
        # A recording sees the thread that starts it.
        self._device_thread.run(self._profiler.start)

    def stop_profile(self, directory: Path, prefix: str) -> list[str]:
        if self._group is not None:
            prefix = f"{prefix or 'trace'}-rank{self._rank}"
        return [self._device_thread.run(self._profiler.stop, directory, prefix)]

    def shutdown(self) -> None:
        if self._runner is None:
            return
        self._device_thread.run(self._profiler.discard)
        self._device_thread.shutdown()
        self._runner = None
        self._empty_cache()

    def _empty_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()

    def _running(self) -> ModelRunner:
        if self._runner is None:
            raise InvariantViolation("the executor was shut down")
        return self._runner

    def _measure_prefill_part(self) -> int:
        """Only where somebody wants to know."""
        if not self._model_info.is_causal or self._settings.prefill_tokens_beside_decodes >= 0:
            return 0
        block_size = self._settings.block_size
        part = measure_prefill_part(
            lambda query_lens: self._device_thread.run(self._running().run_dummy_step, query_lens, block_size),
            self._model_info.max_position_embeddings,
            time.monotonic,
        )
        self._progress(f"prompts beside decodes in parts of {part} tokens")
        return part

    def _run_largest_step(self, block_size: int) -> None:
        num_tokens = self._settings.max_num_batched_tokens
        # As many rows as can sample in one step, the rest of the tokens in sequences as long as they can be.
        num_short = min(self._settings.max_num_seqs - 1, num_tokens - 1)
        query_lens = [1] * num_short + self._sequences_of(num_tokens - num_short)
        self._device_thread.run(self._running().run_dummy_step, query_lens, block_size)

    def _sequences_of(self, num_tokens: int) -> list[int]:
        """Lengths of the fewest sequences that hold so many tokens."""
        longest = self._model_info.max_position_embeddings
        num_full, rest = divmod(num_tokens, longest)
        return [longest] * num_full + ([rest] if rest else [])


def _describe(
    settings: EngineSettings,
    loaded: LoadedModel,
    backend: ModelBackend,
    kernels: Kernels,
    runner: ModelRunner,
    matrices: Matrices,
) -> ModelInfo:
    return ModelInfo(
        architecture=type(loaded.module).__name__,
        dtype=str(loaded.dtype).removeprefix("torch."),
        implementation=f"{backend.name}/{kernels.name}",
        vocab_size=backend.vocab_size,
        max_position_embeddings=context_limit(loaded.config),
        num_layers=len(backend.layer_specs),
        kv_bytes_per_token=runner.kv_bytes_per_token,
        weight_bytes=loaded.weight_bytes,
        kv_cache_groups=tuple(group.describe() for group in backend.layer_groups),
        is_causal=backend.is_causal,
        hidden_size=backend.hidden_size,
        work=work_of(
            loaded,
            matrices,
            backend.layer_specs.values(),
            tensor_parallel_size=settings.tensor_parallel_size,
            is_int8=settings.quantization == "int8",
        ),
    )
