"""What a worker does around the model, without one: the arrays of a step, and the choice of tokens from given logits.

One thread. The least of many repetitions: what the code costs when nothing else runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench import rows
from bench.rows import Row
from engine_core.model_executor.input_batch import InputBatch
from engine_core.model_executor.sampler.sampler import sample
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import RequestKey, SamplingParams

BATCH_SIZES = (1, 8, 64, 256)
VOCAB_SIZE = 49_152
BLOCK_SIZE = 16
NUM_STEPS = 200
NUM_PROMPT_TOKENS = 64
# A language model's logits are peaked: some dozens of tokens hold 90 % of the probability.
LOGITS_SCALE = 4.5

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "top-k 50": SamplingParams(top_k=50),
    "greedy, all penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
    ),
}


class DecodingBatch:
    """Requests that decode, out of step with each other, so that some need a new block in each step."""

    def __init__(self, num_requests: int, sampling: SamplingParams) -> None:
        self.batch = InputBatch(num_requests, BLOCK_SIZE, VOCAB_SIZE)
        self._lengths = {("bench", index): NUM_PROMPT_TOKENS + index % BLOCK_SIZE for index in range(num_requests)}
        new = [
            NewRequestData(key, list(range(length)), [], sampling, 0, (), self._blocks(0, length), 0)
            for key, length in self._lengths.items()
        ]
        self.step(SchedulerOutput(0, new, [], dict(self._lengths), sum(self._lengths.values()), []))

    def plan(self) -> SchedulerOutput:
        cached = [
            CachedRequestData(key, blocks, length)
            for key, length in self._lengths.items()
            if (blocks := self._blocks(length, length + 1))
        ]
        self._lengths = {key: length + 1 for key, length in self._lengths.items()}
        scheduled: dict[RequestKey, int] = dict.fromkeys(self._lengths, 1)
        return SchedulerOutput(0, [], cached, scheduled, len(scheduled), [])

    def step(self, plan: SchedulerOutput) -> None:
        """All of a step but the forward pass and the sampler."""
        self.batch.update(plan)
        inputs = self.batch.prepare(plan.num_scheduled_tokens)
        self.batch.sampling_batch(inputs)
        self.batch.finish_step(inputs, np.full(len(inputs.sampled), 7))

    def _blocks(self, start: int, end: int) -> tuple[list[int], ...]:
        num_old, num_all = -(-start // BLOCK_SIZE), -(-end // BLOCK_SIZE)
        return (list(range(1 + num_old, 1 + num_all)),) if num_all > num_old else ()


def measure_step(num_requests: int) -> float:
    """Least seconds of a step's arrays."""
    decoding = DecodingBatch(num_requests, SAMPLING["greedy"])
    plans = (decoding.plan() for _ in range(NUM_STEPS))
    return min(_seconds(lambda plan=plan: decoding.step(plan)) for plan in plans)


def measure_sampler(num_requests: int, sampling: SamplingParams, num_repetitions: int = 10) -> float:
    """Least seconds from bf16 logits to tokens on the host."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(num_requests, VOCAB_SIZE, generator=generator) * LOGITS_SCALE).bfloat16()
    decoding = DecodingBatch(num_requests, sampling)
    plan = decoding.plan()
    decoding.batch.update(plan)
    batch = decoding.batch.sampling_batch(decoding.batch.prepare(plan.num_scheduled_tokens))
    copies = (logits.clone() for _ in range(num_repetitions))
    return min(_seconds(lambda copy=copy: sample(copy, batch)) for copy in copies)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure() -> Iterator[Row]:
    """The arrays of a step, and each kind of sampling."""
    torch.set_num_threads(1)
    for size in BATCH_SIZES:
        yield Row("worker, arrays of a step, µs", f"B={size}", measure_step(size) * 1e6)
    for name, sampling in SAMPLING.items():
        for size in BATCH_SIZES:
            yield Row(f"sampler, {name}, µs", f"B={size}", measure_sampler(size, sampling) * 1e6)


if __name__ == "__main__":
    rows.main(measure)
