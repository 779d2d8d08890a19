"""Recorded decode steps, by the twin on a CPU: the recorded pass runs again on the same buffers.

What this shows is that padding, buffers and their reuse are right. That CUDA records and replays the pass is not
tested here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.model_executor.attention.kv_cache import LayerKVCache
from engine_core.model_executor.decode_graphs import DecodeGraphs, Pass, graph_sizes
from engine_core.model_executor.model_runner import ModelRunner
from engine_core.model_executor.models.decoder import NativeDecoder
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine_core.scheduler.pooling import PoolingParams, PoolingType
from engine_core.scheduler.request import NO_LOGPROBS, LogprobsParams, SamplingParams
from fakes.decode_steps import (
    BLOCK_SIZE,
    CPU,
    NUM_COLUMNS,
    DeviceKernels,
    eager,
    native_decoder,
    random_caches,
    step_of,
)
from fakes.tiny_models import save_tiny_model, tiny_configs

MAX_NUM_SEQS = 4
NUM_BLOCKS = 1 + MAX_NUM_SEQS * NUM_COLUMNS


class Recorder:
    """The twin: what it records it runs again when asked to."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def __call__(self, forward: Pass) -> Pass:
        self.num_recorded += 1
        forward()

        def replay() -> None:
            self.num_replayed += 1
            forward()

        return replay


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeDecoder:
    """One with a single group of layers, one with two."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    return native_decoder(save_tiny_model(directory, tiny_configs()[request.param]), DeviceKernels())


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def graphs_of(backend: NativeDecoder, recorder: Recorder, max_num_seqs: int = MAX_NUM_SEQS) -> DecodeGraphs:
    return DecodeGraphs(
        backend,
        DeviceKernels(),
        CPU,
        recorder,
        dtype=torch.float32,
        max_num_seqs=max_num_seqs,
        max_model_len=NUM_COLUMNS * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
    )


def assert_same(found: dict[int, LayerKVCache], expected: dict[int, LayerKVCache]) -> None:
    """But for the null block, which padding writes to."""
    for index, cache in found.items():
        torch.testing.assert_close(cache.keys[1:], expected[index].keys[1:])
        torch.testing.assert_close(cache.values[1:], expected[index].values[1:])


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (6, (1, 2, 4, 6)),
        (16, (1, 2, 4, 8, 16)),
        (20, (1, 2, 4, 8, 16, 20)),
        (40, (1, 2, 4, 8, 16, 24, 32, 40)),
    ],
)
def test_sizes(max_num_seqs: int, sizes: tuple[int, ...]):
    assert graph_sizes(max_num_seqs) == sizes


def test_replays_compute_what_eager_steps_compute(backend: NativeDecoder, recorder: Recorder):
    """Batches grow and shrink: what a former step left in the buffers must neither be read nor written to."""
    num_groups = len(backend.layer_groups)
    replayed, expected = random_caches(backend, NUM_BLOCKS), random_caches(backend, NUM_BLOCKS)
    graphs = graphs_of(backend, recorder)
    steps = [
        [(0, 9, 1), (1, 3, 1), (2, 14, 1)],
        [(1, 4, 1)],
        [(0, 10, 1), (3, 0, 1)],
        [(0, 11, 1), (1, 5, 1), (2, 15, 1), (3, 1, 1)],
        [(3, 2, 1), (0, 12, 1), (1, 6, 1)],
    ]
    for step in steps:
        inputs = step_of(step, num_groups)
        assert graphs.fits(inputs)
        found = graphs.forward(inputs, replayed)
        torch.testing.assert_close(found, eager(backend, inputs, expected), rtol=1e-4, atol=1e-4)
        assert_same(replayed, expected)
    assert recorder.num_recorded == len(graph_sizes(MAX_NUM_SEQS))
    assert recorder.num_replayed == len(steps)


def test_only_sampled_sequences_have_logits(backend: NativeDecoder, recorder: Recorder):
    caches = random_caches(backend, NUM_BLOCKS)
    sequences = [(0, 9, 1), (1, 3, 1), (2, 14, 1)]
    graphs = graphs_of(backend, recorder)
    num_groups = len(backend.layer_groups)
    all_rows = graphs.forward(step_of(sequences, num_groups), caches).clone()
    some = graphs.forward(step_of(sequences, num_groups, sampled=[0, 2]), caches)
    torch.testing.assert_close(some, all_rows[[0, 2]])


def test_what_does_not_fit(backend: NativeDecoder, recorder: Recorder):
    graphs, num_groups = graphs_of(backend, recorder, max_num_seqs=2), len(backend.layer_groups)
    assert graphs.fits(step_of([(0, 1, 1), (1, 1, 1)], num_groups))
    assert not graphs.fits(step_of([(0, 1, 1), (1, 0, 2)], num_groups))
    assert not graphs.fits(step_of([(0, 1, 1), (1, 1, 1), (2, 1, 1)], num_groups))
    assert not graphs.fits(step_of([(0, NUM_COLUMNS * BLOCK_SIZE, 1)], num_groups))


def test_they_are_recorded_again_over_other_caches_and_when_dropped(backend: NativeDecoder, recorder: Recorder):
    graphs, inputs = graphs_of(backend, recorder, max_num_seqs=1), step_of([(0, 5, 1)], len(backend.layer_groups))
    one, two = random_caches(backend, NUM_BLOCKS), random_caches(backend, NUM_BLOCKS, seed=1)
    graphs.forward(inputs, one)
    assert recorder.num_recorded == 1
    torch.testing.assert_close(
        graphs.forward(inputs, two),
        eager(backend, inputs, random_caches(backend, NUM_BLOCKS, seed=1)),
        rtol=1e-4,
        atol=1e-4,
    )
    assert recorder.num_recorded == 2
    graphs.drop()
    graphs.forward(inputs, two)
    assert recorder.num_recorded == 3


def test_a_runner_replays_decodes_and_no_others(backend: NativeDecoder, recorder: Recorder):
    """Prompts run eagerly; so does a step like a decode that tells log-probabilities or a vector of its prompt."""
    runner = ModelRunner(backend, torch.float32, CPU, MAX_NUM_SEQS, DeviceKernels())
    runner.initialize_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    runner.graphs = graphs_of(backend, recorder)
    step = Steps(runner, len(backend.layer_groups))
    token_ids = [step.prompt(0, [5, 6, 7, 8, 9]), *(step.decode(0) for _ in range(3))]
    assert recorder.num_replayed == 3

    eager_runner = ModelRunner(backend, torch.float32, CPU, MAX_NUM_SEQS, DeviceKernels())
    eager_runner.initialize_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    step = Steps(eager_runner, len(backend.layer_groups))
    assert [step.prompt(0, [5, 6, 7, 8, 9]), *(step.decode(0) for _ in range(3))] == token_ids

    step = Steps(runner, len(backend.layer_groups))
    step.prompt(1, [5, 6, 7], count=1, logprobs=LogprobsParams(None, 2))
    step = Steps(runner, len(backend.layer_groups))
    assert step.prompt(2, [5], pooling=PoolingParams(type=PoolingType.MEAN)) is None
    assert recorder.num_replayed == 3


def test_a_runner_forgets_recordings_when_memory_moves(backend: NativeDecoder, recorder: Recorder):
    runner = ModelRunner(backend, torch.float32, CPU, 1, DeviceKernels())
    runner.initialize_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    runner.graphs = graphs_of(backend, recorder, max_num_seqs=1)
    runner.record_graphs(BLOCK_SIZE, lambda _: None)
    assert recorder.num_recorded == 1
    step = Steps(runner, len(backend.layer_groups))
    step.prompt(0, [5, 6])
    step.decode(0)
    assert recorder.num_recorded == 1
    runner.release_kv_cache()
    runner.restore_kv_cache()
    step.decode(0)
    assert recorder.num_recorded == 2
    runner.move_weights(CPU)
    step.decode(0)
    assert recorder.num_recorded == 3


class Steps:
    """One request at a time, greedy, all of whose blocks are there from the beginning."""

    def __init__(self, runner: ModelRunner, num_groups: int) -> None:
        self._runner = runner
        self._num_groups = num_groups
        self._computed = 0

    def prompt(
        self, number: int, token_ids: list[int], count: int = 0, logprobs=NO_LOGPROBS, pooling=None
    ) -> int | None:
        key, blocks = ("s", number), list(range(1 + number * NUM_COLUMNS, 1 + (number + 1) * NUM_COLUMNS))
        new = NewRequestData(
            key,
            token_ids,
            [],
            SamplingParams(temperature=0.0),
            0,
            (),
            (blocks,) * self._num_groups,
            0,
            logprobs=logprobs,
            pooling=pooling,
        )
        return self._run(key, count or len(token_ids), [new], [])

    def decode(self, number: int) -> int | None:
        key = ("s", number)
        return self._run(key, 1, [], [CachedRequestData(key, (), self._computed, False)])

    def _run(self, key, count: int, new: list, cached: list) -> int | None:
        self._runner.execute_model(SchedulerOutput(1, new, cached, {key: count}, count, []))
        self._computed += count
        [token_ids] = self._runner.sample_tokens(None).sampled_token_ids
        return token_ids[0] if token_ids else None


def test_buffers_are_where_kernels_were_compiled_for(backend: NativeDecoder, recorder: Recorder):
    graphs = graphs_of(backend, recorder)
    buffers = graphs._buffers
    tensors = [buffers.input_ids, buffers.positions, *buffers.slot_mappings, buffers.seq_lens, *buffers.block_tables]
    assert {tensor.data_ptr() % 16 for tensor in tensors} == {0}
    assert np.prod(graphs._logits.shape) == MAX_NUM_SEQS * backend.vocab_size
