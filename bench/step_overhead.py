"""How long the step loop takes around the model: scheduling, KV cache, stop checks, routing of outputs.

The busy loop runs with an executor that answers at once; reported is the time between the end of one call of the
executor and the start of the next, for running requests that decode, and for others that wait for a place beside them.
Single-threaded: nothing is sent, nothing is decoded.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future

from rich.console import Console
from rich.table import Table

from engine_core.config import EngineSettings
from engine_core.core_proc import EngineCoreProc
from engine_core.lifecycle import EngineLifecycle
from engine_core.model_executor.executor import FailureCallback, ModelInfo
from engine_core.output_queue import OutputQueue
from engine_core.resolved_config import ServedModel
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.request import Request, SamplingParams, StopConditions
from engine_core.startup import LoadedModel, Progress, start_engine
from engine_core.step_progress import StepProgress
from engine_core.structured_output.bitmask import GrammarBitmask

BATCH_SIZES = (1, 8, 64, 128, 256)
# Beside the largest batch.
NUM_WAITING = (0, 100, 1000, 10_000)
NUM_PROMPT_TOKENS = 8
NUM_OUTPUT_TOKENS = 512
SESSION = "bench"
EOS = 2
TOKEN = 7


class InstantExecutor:
    """Samples the same token for every request; notes the time from each answer to the next call."""

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self.num_steps = 0
        self._answered: float | None = None
        self._output = ModelRunnerOutput([], [])

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            architecture="Instant",
            dtype="float32",
            vocab_size=1000,
            implementation="instant",
            max_position_embeddings=4096,
            num_layers=1,
            kv_bytes_per_token=1,
            weight_bytes=0,
        )

    @property
    def max_concurrent_batches(self) -> int:
        return 1

    def determine_num_blocks(self, block_size: int) -> int:
        return 1 + max(BATCH_SIZES) * (1 + (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS) // block_size)

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        if self._answered is not None:
            self.gaps_s.append(time.perf_counter() - self._answered)
        self.num_steps += 1
        keys = list(scheduler_output.num_scheduled_tokens)
        # Every prompt fits one step, so every scheduled request samples.
        self._output = ModelRunnerOutput(keys, [[TOKEN] for _ in keys])

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._output)
        self._answered = time.perf_counter()
        return future

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def measure(batch_size: int, num_waiting: int = 0) -> list[float]:
    """Gaps of all steps in which `batch_size` requests decode while `num_waiting` others wait."""
    executor = InstantExecutor()

    def clock() -> float:
        # The drain is over when the running requests have one token to go.
        return time.monotonic() if executor.num_steps < NUM_OUTPUT_TOKENS - 1 else math.inf

    proc = _make_proc(executor, batch_size, clock)
    for handle in range(batch_size + num_waiting):
        request = _request(handle)
        proc.core.preprocess_add_request(request)
        proc.core.add_request(request)
    proc.request_shutdown(drain_timeout_s=3600.0, reason="bench")
    proc.run_busy_loop()
    # The first gap follows the prefill.
    return executor.gaps_s[1:]


def _make_proc(executor: InstantExecutor, batch_size: int, clock: Callable[[], float]) -> EngineCoreProc:
    def load(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
        return LoadedModel(executor, ServedModel("instant", "", ""), b"")

    settings = EngineSettings(
        max_num_seqs=batch_size, max_num_batched_tokens=8192, max_queued_requests=batch_size + max(NUM_WAITING)
    )
    lifecycle, output_queue = EngineLifecycle(), OutputQueue(time.monotonic)
    output_queue.attach(SESSION)
    core = start_engine(settings, load, lambda error: None, lambda: None, clock).core
    return EngineCoreProc(core, output_queue, lifecycle, StepProgress(time.monotonic), clock)


def _request(handle: int) -> Request:
    return Request(
        key=(SESSION, handle),
        request_id=f"request-{handle}",
        prompt_token_ids=[10 + handle, *range(11, 10 + NUM_PROMPT_TOKENS)],
        sampling=SamplingParams(),
        stop=StopConditions(max_tokens=NUM_OUTPUT_TOKENS, eos_token_ids=frozenset({EOS})),
        arrival_time=0.0,
    )


def main() -> None:
    """Measure every batch size, then the largest one beside more and more waiting requests; one line for each."""
    table = Table(
        "running", "waiting", "steps", "median µs a step", "p99 µs a step", "median µs a token", title="Step overhead"
    )
    loads = [(batch_size, 0) for batch_size in BATCH_SIZES]
    loads += [(max(BATCH_SIZES), num_waiting) for num_waiting in NUM_WAITING if num_waiting]
    for batch_size, num_waiting in loads:
        gaps = measure(batch_size, num_waiting)
        median = statistics.median(gaps) * 1e6
        p99 = statistics.quantiles(gaps, n=100)[98] * 1e6
        figures = (f"{median:.0f}", f"{p99:.0f}", f"{median / batch_size:.2f}")
        table.add_row(str(batch_size), str(num_waiting), str(len(gaps)), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
