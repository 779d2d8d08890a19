"""The executor with real worker processes: the same tokens as without, operations on all, every way to end."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import engine_core.__main__ as engine_main
import engine_core.model_executor.multiproc_executor as module_under_test
from core_driver import CoreDriver
from engine_core.config import EngineSettings
from engine_core.death import describe_death
from engine_core.messages import DeathCause
from engine_core.model_executor.executor import ExecutorFailedError, MemoryPart, WorkerError, WorkerHealth
from engine_core.model_executor.in_process_executor import InProcessExecutor
from engine_core.model_executor.multiproc_executor import MultiprocExecutor
from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.parallel.worker_messages import WorkerStart
from engine_core.model_executor.parallel.worker_process import WorkerProcess
from engine_core.model_executor.startup_error import StartupError
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from engine_core.scheduler.pooling import PoolingParams, PoolingType
from engine_core.scheduler.request import SamplingParams
from fakes import failing_worker
from fakes.tiny_models import save_shardable_model
from stepwire.errors import InvariantViolation

pytestmark = pytest.mark.slow

BLOCK_SIZE = 4
TIMEOUT_S = 60.0
A = ("s", 1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, embedded_model_dir) -> Path:
    return save_shardable_model(tmp_path_factory.mktemp("multiproc") / "llama", embedded_model_dir)


@pytest.fixture
def importable_fakes(monkeypatch) -> None:
    """In the workers too."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


def settings_of(shards: int, stages: int = 1) -> EngineSettings:
    return EngineSettings(
        model="m",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_blocks=50,
        tensor_parallel_size=shards,
        pipeline_parallel_size=stages,
    )


class Running:
    """An executor with two shards, and what it reports."""

    def __init__(self, model_dir: Path) -> None:
        self.failures: list[BaseException] = []
        self.has_failed = threading.Event()
        self.executor = MultiprocExecutor(settings_of(2), model_dir, self._failed, lambda _: None)
        self.executor.initialize_kv_cache(self.executor.determine_num_blocks(BLOCK_SIZE), BLOCK_SIZE)
        self.executor.warm_up()

    def _failed(self, error: BaseException) -> None:
        self.failures.append(error)
        self.has_failed.set()

    @property
    def workers(self) -> list[psutil.Process]:
        """By rank."""
        return [psutil.Process(worker.pid) for worker in self.executor._pool._workers]

    def step(self, scheduled, *, new=(), finished=()) -> list[list[int]]:
        total = sum(scheduled.values())
        self.executor.execute_model(SchedulerOutput(1, list(new), [], scheduled, total, list(finished)))
        return self.executor.sample_tokens(None).result(TIMEOUT_S).sampled_token_ids


@pytest.fixture
def running(model_dir) -> Iterator[Running]:
    running = Running(model_dir)
    yield running
    running.executor.shutdown()


def new(prompt: list[int]) -> NewRequestData:
    return NewRequestData(A, prompt, [], SamplingParams(temperature=0.0), 0, (), (list(range(1, 10)),), 0)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 40_000, (length,), generator=generator).tolist() for length in (3, 17, 40, 8, 25)]


def answers_with(model_dir: Path, **settings: object) -> tuple[list[list[int]], list[bytes]]:
    """Tokens of some prompts, and vectors of the same."""
    # Chunked prefills, and a cache too small for all: preemption and recompute.
    driver = CoreDriver(
        model_dir, block_size=BLOCK_SIZE, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=16, **settings
    )
    try:
        pooled = [driver.add(prompt, 0, pooling=PoolingParams(type=PoolingType.MEAN)) for prompt in prompts()]
        tokens = [driver.add(prompt, 24) for prompt in prompts()]
        driver.run()
        return [driver.tokens[key] for key in tokens], [driver.pooled[key] for key in pooled]
    finally:
        driver.core.shutdown()


@pytest.fixture(scope="module")
def expected(model_dir) -> tuple[list[list[int]], list[bytes]]:
    return answers_with(model_dir)


@pytest.mark.parametrize(("shards", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_workers_give_the_same_greedy_tokens_and_vectors_as_one_process(model_dir, expected, shards, stages):
    tokens, pooled = answers_with(model_dir, tensor_parallel_size=shards, pipeline_parallel_size=stages)
    assert tokens == expected[0]
    for vector, whole in zip(pooled, expected[1], strict=True):
        np.testing.assert_allclose(np.frombuffer(vector, "<f4"), np.frombuffer(whole, "<f4"), atol=1e-5)


def test_operations_reach_every_worker(running, model_dir, tmp_path):
    executor = running.executor
    alone = InProcessExecutor(settings_of(1), model_dir, lambda _: None)
    info, whole = executor.model_info, alone.model_info
    alone.shutdown()
    assert (info.architecture, info.vocab_size, info.num_layers) == (
        whole.architecture,
        whole.vocab_size,
        whole.num_layers,
    )
    assert info.kv_bytes_per_token == whole.kv_bytes_per_token
    assert info.work == whole.work
    # The embedding is on both.
    assert whole.weight_bytes < info.weight_bytes < 2 * whole.weight_bytes
    assert executor.max_concurrent_batches == 2
    assert executor.check_health() == [WorkerHealth(0, is_healthy=True), WorkerHealth(1, is_healthy=True)]
    assert executor.release_memory(MemoryPart.KV_CACHE) == 50 * BLOCK_SIZE * info.kv_bytes_per_token
    executor.restore_memory(MemoryPart.KV_CACHE)
    executor.start_profile()
    executor.execute_dummy_batch(3)
    files = executor.stop_profile(tmp_path, "mine")
    assert [Path(file).name.split("-")[:2] for file in files] == [["mine", "rank0"], ["mine", "rank1"]]
    for file in files:
        assert json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
    assert (executor.can_change_weights, alone.can_change_weights) == (False, True)
    for change in (executor.weight_shapes, executor.discard_weights, lambda: executor.load_weights(model_dir)):
        with pytest.raises(InvariantViolation, match="can_change_weights"):
            change()
    # A failure is the answer of its call, and the executor lives.
    with pytest.raises(WorkerError, match=r"worker [01]: a profile was stopped that had not been started"):
        executor.stop_profile(tmp_path, "")
    assert len(running.step({A: 3}, new=[new([5, 6, 7])])[0]) == 1
    assert running.failures == []
    workers = running.workers
    executor.shutdown()
    executor.shutdown()
    assert not any(worker.is_running() for worker in workers)
    assert running.failures == []
    with pytest.raises(WorkerError, match="shut down"):
        executor.warm_up()


def test_a_killed_worker_is_reported_by_name_and_fails_the_step_that_waits(running):
    victim = running.workers[1]
    running.step({A: 3}, new=[new([5, 6, 7])])
    # The leader waits for it in the middle of the step.
    victim.suspend()
    running.executor.execute_model(SchedulerOutput(2, [], [], {A: 1}, 1, []))
    future = running.executor.sample_tokens(None)
    victim.kill()
    error = future.exception(TIMEOUT_S)
    assert running.has_failed.wait(TIMEOUT_S)
    assert str(error) == f"worker 1 (pid {victim.pid}) was ended by SIGKILL"
    assert [str(failure) for failure in running.failures] == [str(error)]
    with pytest.raises(WorkerError, match="SIGKILL"):
        running.executor.execute_model(SchedulerOutput(3, [], [], {A: 1}, 1, []))


def test_a_worker_killed_while_nothing_runs_is_reported_too(running):
    victim = running.workers[0]
    pipes = [worker.connection for worker in running.executor._pool._workers]
    victim.kill()
    assert running.has_failed.wait(TIMEOUT_S)
    assert str(running.failures[0]) == f"worker 0 (pid {victim.pid}) was ended by SIGKILL"
    # The loop may be writing to any of them until it shuts the executor down itself.
    assert not any(pipe.closed for pipe in pipes)
    running.executor.shutdown()
    assert all(pipe.closed for pipe in pipes)


def test_an_exception_in_a_worker_arrives_with_its_class_and_message(running):
    running.executor.execute_model(SchedulerOutput(1, [new([5, 6, 100_000])], [], {A: 3}, 3, []))
    error = running.executor.sample_tokens(None).exception(TIMEOUT_S)
    assert isinstance(error, WorkerError)
    assert error.cause_type == "IndexError"
    assert "worker" in str(error)
    assert "index out of range" in str(error)
    assert running.has_failed.wait(TIMEOUT_S)


def test_a_dummy_batch_that_one_worker_fails_ends_the_engine_with_its_cause(importable_fakes, running, monkeypatch):
    monkeypatch.setattr(InProcessExecutor, "execute_dummy_batch", failing_worker.fail_in_the_last)
    with pytest.raises(ExecutorFailedError) as caught:
        running.executor.execute_dummy_batch(3)
    dead = describe_death(caught.value, 0)
    assert (dead.cause, dead.cause_type) == (DeathCause.EXECUTOR_FAILED, "RuntimeError")
    assert dead.message == f"worker 1: {failing_worker.MESSAGE}"


def test_a_worker_that_does_not_answer_is_unhealthy_until_it_does(running, monkeypatch):
    def wait(futures, timeout_s):
        # The time is for the one that is stopped: the other may have a busy machine.
        futures[0].result(TIMEOUT_S)
        return wait_for_all(futures, timeout_s)

    wait_for_all = module_under_test.wait
    monkeypatch.setattr(module_under_test, "wait", wait)
    monkeypatch.setattr(module_under_test, "HEALTH_TIMEOUT_S", 1.0)
    stopped = running.workers[1]
    stopped.suspend()
    first, second = running.executor.check_health()
    assert first.is_healthy
    assert second == WorkerHealth(1, is_healthy=False, message="no answer within 1 s")
    stopped.resume()
    monkeypatch.setattr(module_under_test, "HEALTH_TIMEOUT_S", TIMEOUT_S)
    # Its late answer goes to nobody.
    assert all(health.is_healthy for health in running.executor.check_health())


def test_signals_to_the_process_group_leave_the_workers_alone(running):
    for worker in running.workers:
        worker.send_signal(signal.SIGINT)
        worker.send_signal(signal.SIGTERM)
        assert os.getpgid(worker.pid) != os.getpgid(0)
    assert len(running.step({A: 3}, new=[new([5, 6, 7])])[0]) == 1


def test_what_a_worker_can_not_load_is_the_engines_start_error(model_dir):
    failures: list[BaseException] = []
    with pytest.raises(StartupError, match=r"^--tensor-parallel-size 4 does not divide .* possible are 1, 2$"):
        MultiprocExecutor(settings_of(4), model_dir, failures.append, lambda _: None)


@pytest.mark.parametrize("is_loading", [False, True])
def test_the_end_of_the_engine_ends_a_worker_that_is_still_starting(model_dir, tmp_path, is_loading):
    worker = WorkerProcess(Place(0, 2, 1))
    if is_loading:
        # The other one never comes: it waits for it.
        start = WorkerStart(settings_of(2), model_dir, worker.place, tmp_path / "rendezvous")
        worker.connection.send_bytes(pickle.dumps(start))
        while not (tmp_path / "rendezvous").exists():
            assert not worker.wait(0.05)
    worker.connection.close()
    assert worker.wait(TIMEOUT_S)


def test_a_worker_whose_engine_has_ended_before_it_could_be_tied_to_it_ends_too():
    # The pipe stays open: it is not the end of that which ends the worker.
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "engine_core.model_executor.parallel.worker"]
        command += [str(theirs.fileno()), str(os.getpid() + 1)]
        assert subprocess.run(command, pass_fds=(theirs.fileno(),), timeout=TIMEOUT_S, check=False).returncode == 1


def test_workers_outlive_a_thread_that_has_started_them_for_another(model_dir):
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(Running, model_dir).result()
    try:
        assert len(running.step({A: 3}, new=[new([5, 6, 7])])[0]) == 1
    finally:
        running.executor.shutdown()


def test_a_start_that_fails_after_the_workers_have_loaded_leaves_none(model_dir, monkeypatch):
    def interrupt(_: Path) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_main, "content_version", interrupt)
    settings = settings_of(2).model_copy(update={"model": str(model_dir)})
    with pytest.raises(KeyboardInterrupt):
        engine_main.load_model(settings, lambda _: None, lambda _: None)
