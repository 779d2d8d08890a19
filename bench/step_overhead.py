"""How long the step loop takes around the model: scheduling, KV cache, stop checks, routing of outputs.

The busy loop runs with an executor that answers at once; reported is the time between the end of one call of the
executor and the start of the next, for running requests that decode, and for others that wait for a place beside them.
Single-threaded: nothing is sent, nothing is decoded; what the loop hands over is taken while the executor "runs".
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from bench import rows
from bench.instant_executor import InstantExecutor
from bench.rows import Row
from engine_core.config import EngineSettings
from engine_core.core_proc import EngineCoreProc
from engine_core.lifecycle import EngineLifecycle
from engine_core.model_executor.executor import FailureCallback
from engine_core.output_queue import Outbox, OutputQueue
from engine_core.resolved_config import ServedModel
from engine_core.scheduler.output import ModelRunnerOutput
from engine_core.scheduler.request import Request, SamplingParams, StopConditions
from engine_core.startup import LoadedModel, Progress, start_engine
from engine_core.step_progress import StepProgress
from engine_core.structured_output.bitmask import GrammarBitmask

# Running requests -> most milliseconds a step; None = measured for the curve.
TARGETS_MS = {1: None, 8: None, 64: 0.5, 128: None, 256: 2.0}
# Beside the largest batch.
NUM_WAITING = (1000, 10_000)
NUM_PROMPT_TOKENS = 8
NUM_OUTPUT_TOKENS = 512
SESSION = "bench"
EOS = 2
# Of 16 tokens each: enough for all, and for the longest context that the executor's model is made for.
NUM_BLOCKS = 1 << 14


def measure() -> Iterator[Row]:
    for num_running, target in TARGETS_MS.items():
        gaps = step_gaps(num_running)
        yield Row("step loop around the model, ms", f"{num_running} running", statistics.median(gaps) * 1e3, target)
        if target is not None:
            yield Row("the same, p99", f"{num_running} running", statistics.quantiles(gaps, n=100)[98] * 1e3)
    for num_waiting in NUM_WAITING:
        num_running = max(TARGETS_MS)
        median = statistics.median(step_gaps(num_running, num_waiting))
        yield Row("step loop around the model, ms", f"{num_running} running, {num_waiting} waiting", median * 1e3)


class _TakingExecutor(InstantExecutor):
    """Stands in for the output thread too: a loop whose outputs pile up would pay for fresh memory in each step."""

    def __init__(self, num_blocks: int, outbox: Outbox) -> None:
        super().__init__(num_blocks)
        self._outbox = outbox

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        if len(self._outbox):
            self._outbox.take()
        return super().sample_tokens(bitmask)


def step_gaps(num_running: int, num_waiting: int = 0) -> list[float]:
    """Seconds of all steps in which `num_running` requests decode while `num_waiting` others wait."""
    output_queue = OutputQueue(time.monotonic)
    executor = _TakingExecutor(NUM_BLOCKS, output_queue.attach(SESSION))

    def clock() -> float:
        # The drain is over when the running requests have one token to go.
        return time.monotonic() if executor.num_steps < NUM_OUTPUT_TOKENS - 1 else math.inf

    proc = _make_proc(executor, output_queue, num_running, num_waiting, clock)
    for handle in range(num_running + num_waiting):
        request = _request(handle)
        proc.core.preprocess_add_request(request)
        proc.core.add_request(request)
    proc.request_shutdown(drain_timeout_s=3600.0, reason="bench")
    proc.run_busy_loop()
    # The first gap follows the prefill.
    return executor.gaps_s[num_running][1:]


def _make_proc(
    executor: InstantExecutor,
    output_queue: OutputQueue,
    num_running: int,
    num_waiting: int,
    clock: Callable[[], float],
) -> EngineCoreProc:
    def load(settings: EngineSettings, failure_callback: FailureCallback, progress: Progress) -> LoadedModel:
        return LoadedModel(executor, ServedModel("instant", "", ""), b"")

    settings = EngineSettings(
        max_num_seqs=num_running, max_num_batched_tokens=8192, max_queued_requests=num_running + num_waiting
    )
    core = start_engine(settings, load, lambda error: None, lambda: None, clock).core
    return EngineCoreProc(core, output_queue, EngineLifecycle(), StepProgress(time.monotonic), clock)


def _request(handle: int) -> Request:
    return Request(
        key=(SESSION, handle),
        request_id=f"request-{handle}",
        prompt_token_ids=[10 + handle, *range(11, 10 + NUM_PROMPT_TOKENS)],
        sampling=SamplingParams(),
        stop=StopConditions(max_tokens=NUM_OUTPUT_TOKENS, eos_token_ids=frozenset({EOS})),
        arrival_time=0.0,
    )


if __name__ == "__main__":
    rows.main(measure)
