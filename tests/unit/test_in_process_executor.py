"""The executor around a tiny model: facts, life cycle, and a seeded generation that survives a preemption."""

from __future__ import annotations

import gzip
import json
import threading
import weakref
from pathlib import Path

import pytest
import torch

from engine_core.config import EngineSettings
from engine_core.kv_cache.kv_cache_layout import KVCacheGroup
from engine_core.model_executor.executor import MemoryPart, ModelInfo, ModelWork, WorkerHealth
from engine_core.model_executor.in_process_executor import InProcessExecutor
from engine_core.model_executor.parallel.place import Place
from engine_core.model_executor.prefill_part import PARTS
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import SamplingParams
from fakes.one_process_group import OneProcessGroup
from fakes.tiny_models import save_tiny_model, tiny_configs
from stepwire.errors import InvariantViolation

A, B = ("s", 1), ("s", 2)
PROMPT = [5, 6, 7, 8, 9]
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("executor") / "llama", tiny_configs()["llama"])


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def loaded(model_dir, request):
    settings = EngineSettings(
        model="m",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_blocks=50,
        async_scheduling=request.param,
    )
    executor = InProcessExecutor(settings, model_dir, lambda _: None)
    yield executor
    executor.shutdown()


@pytest.fixture
def executor(loaded):
    loaded.initialize_kv_cache(loaded.determine_num_blocks(BLOCK_SIZE), BLOCK_SIZE)
    loaded.warm_up()
    return loaded


def test_math_threads_are_as_many_as_told(model_dir) -> None:
    num_before = torch.get_num_threads()
    other = 1 if num_before > 1 else 2
    settings = EngineSettings(model="m", device="cpu", num_blocks=50, num_threads=other, async_scheduling=True)
    executor = InProcessExecutor(settings, model_dir, lambda _: None)
    try:
        assert executor._device_thread.run(torch.get_num_threads) == other
    finally:
        executor.shutdown()
        torch.set_num_threads(num_before)


@pytest.mark.parametrize("kernels", ["portable", "torch"])
def test_the_kernels_are_those_that_the_environment_names(model_dir, monkeypatch, kernels: str) -> None:
    monkeypatch.setenv("STEPWIRE_CPU_KERNELS", kernels)
    settings = EngineSettings(model="m", device="cpu", num_blocks=50, async_scheduling=False)
    executor = InProcessExecutor(settings, model_dir, lambda _: None)
    assert executor.model_info.implementation == f"native/{kernels}"
    executor.shutdown()


def new(key, sampling, *, prompt=PROMPT, output=(), blocks=range(1, 10), computed=0) -> NewRequestData:
    return NewRequestData(key, list(prompt), list(output), sampling, 0, (), (list(blocks),), computed)


def step(executor, scheduled, *, new=(), cached=(), finished=()) -> dict:
    total = sum(scheduled.values())
    executor.execute_model(SchedulerOutput(1, list(new), list(cached), scheduled, total, list(finished)))
    result = executor.sample_tokens(None).result(timeout=60)
    assert result.keys == list(scheduled)
    return dict(zip(result.keys, result.sampled_token_ids, strict=True))


def generate(executor, key, sampling, count, **request) -> list[int]:
    first = new(key, sampling, **request)
    known = len(first.prompt_token_ids) + len(first.output_token_ids)
    tokens = step(executor, {key: known - first.num_computed_tokens}, new=[first])[key]
    while len(tokens) < count:
        tokens += step(executor, {key: 1})[key]
    step(executor, {}, finished=[key])
    return tokens


def test_facts_of_the_model(loaded):
    # Which kernels depends on the machine.
    kernels = loaded.model_info.implementation.removeprefix("native/")
    assert loaded.model_info == ModelInfo(
        architecture="LlamaForCausalLM",
        dtype="float32",
        implementation=f"native/{kernels}",
        vocab_size=211,
        max_position_embeddings=128,
        num_layers=3,
        kv_bytes_per_token=3 * 2 * 2 * 8 * 4,
        weight_bytes=loaded.model_info.weight_bytes,
        hidden_size=32,
        # Measured.
        prefill_tokens_beside_decodes=loaded.model_info.prefill_tokens_beside_decodes,
        kv_cache_groups=(KVCacheGroup(num_layers=3),),
        # 32 features, heads of 8: 4 for queries, 2 for keys, 2 for values; 48 in the middle of the MLP.
        work=ModelWork(
            num_matrix_params=3 * 32 * (32 + 16 + 16 + 32 + 3 * 48),
            num_head_params=32 * 211,
            attention_width=3 * 4 * (8 + 8),
            layer_bytes=3 * 32 * (32 + 16 + 16 + 32 + 3 * 48) * 4,
            head_bytes=32 * 211 * 4,
        ),
    )
    assert loaded.model_info.weight_bytes > 0
    assert loaded.model_info.prefill_tokens_beside_decodes in PARTS
    assert loaded.determine_num_blocks(BLOCK_SIZE) == 50


def test_partial_prefill_samples_nothing(executor):
    assert step(executor, {A: 3}, new=[new(A, SamplingParams(temperature=0.0))]) == {A: []}
    assert len(step(executor, {A: 2})[A]) == 1


def test_empty_step_drops_finished_requests(executor):
    generate(executor, A, SamplingParams(temperature=0.0), 2)
    # Its row is gone: the key could not be scheduled any more.
    with pytest.raises(KeyError):
        step(executor, {A: 1})


def test_a_sampled_generation_repeats_itself(executor):
    sampling = SamplingParams(temperature=1.5, seed=7)
    expected = generate(executor, A, sampling, 12)
    assert generate(executor, A, sampling, 12) == expected
    assert generate(executor, A, SamplingParams(temperature=1.5, seed=8), 12) != expected


def test_a_preempted_generation_goes_on_as_if_nothing_had_happened(executor):
    sampling = SamplingParams(temperature=1.5, seed=7)
    expected = generate(executor, A, sampling, 10)
    tokens = step(executor, {A: 5}, new=[new(A, sampling)])[A]
    for _ in range(3):
        tokens += step(executor, {A: 1})[A]
    resumed = CachedRequestData(A, ([20, 21, 22, 23],), 0, is_resumed=True)
    tokens += step(executor, {A: 4}, cached=[resumed])[A]
    tokens += step(executor, {A: 5})[A]
    while len(tokens) < 10:
        tokens += step(executor, {A: 1})[A]
    assert tokens == expected


def test_a_generation_moved_from_another_engine_goes_on_unchanged(executor):
    sampling = SamplingParams(temperature=1.5, seed=7, frequency_penalty=0.5)
    expected = generate(executor, A, sampling, 10)
    assert generate(executor, B, sampling, 6, output=expected[:4]) == expected[4:]


def test_neighbours_do_not_change_a_generation(executor):
    sampling = SamplingParams(temperature=1.5, seed=7)
    expected = generate(executor, A, sampling, 4)
    other = new(B, SamplingParams(temperature=1.0, seed=1), prompt=range(50, 70), blocks=range(30, 45))
    tokens = step(executor, {B: 20, A: 5}, new=[other, new(A, sampling)])[A]
    while len(tokens) < 4:
        tokens += step(executor, {A: 1, B: 1})[A]
    assert tokens == expected


def test_an_error_in_a_step_reaches_the_caller(executor):
    with pytest.raises(IndexError):
        step(executor, {A: 5}, new=[new(A, SamplingParams(), prompt=[5, 6, 7, 8, 100_000])])


def test_calls_out_of_order(loaded):
    empty = SchedulerOutput(1, [], [], {}, 0, [])
    with pytest.raises(InvariantViolation):
        loaded.sample_tokens(None).result()
    loaded.execute_model(empty)
    with pytest.raises(InvariantViolation):
        loaded.sample_tokens(None).result()
    loaded.initialize_kv_cache(5, BLOCK_SIZE)
    loaded.execute_model(empty)
    loaded.execute_model(empty)
    with pytest.raises(InvariantViolation):
        loaded.sample_tokens(None).result()


def test_memory_given_back_and_taken_again(executor):
    expected = generate(executor, A, SamplingParams(), 6)
    known = new(B, SamplingParams())
    tokens = step(executor, {B: 5}, new=[known])[B]
    caches = [weakref.ref(cache.keys) for cache in executor._runner._caches.values()]
    weights = {name: tensor.clone() for name, tensor in executor._runner._backend._module.state_dict().items()}

    kv_cache_bytes = 50 * BLOCK_SIZE * executor.model_info.kv_bytes_per_token
    assert executor.release_memory(MemoryPart.KV_CACHE) == kv_cache_bytes
    assert executor.release_memory(MemoryPart.KV_CACHE) == 0
    # On a CPU the weights are where an offload would put them.
    assert executor.release_memory(MemoryPart.WEIGHTS) == 0
    assert [cache() for cache in caches] == [None] * len(caches)

    for part in (MemoryPart.WEIGHTS, MemoryPart.KV_CACHE):
        executor.restore_memory(part)
    module = executor._runner._backend._module
    assert all(torch.equal(tensor, weights[name]) for name, tensor in module.state_dict().items())
    # The record of the request has stayed; its KV is computed again.
    resumed = CachedRequestData(B, (list(range(1, 10)),), 0, is_resumed=True)
    tokens += step(executor, {B: 6}, cached=[resumed])[B]
    while len(tokens) < 6:
        tokens += step(executor, {B: 1})[B]
    assert tokens == expected


def test_weights_leave_the_device_and_come_back(executor):
    # The meta device stands in for a host: what is there can not be lost unnoticed.
    backend = executor._runner._backend
    num_bytes = sum(tensor.nbytes for tensor in [*backend._module.parameters(), *backend._module.buffers()])
    assert backend.move_weights(torch.device("meta")) == num_bytes
    assert {parameter.device.type for parameter in backend._module.parameters()} == {"meta"}


def test_a_dummy_batch_may_be_longer_than_the_context(executor):
    longest = executor.model_info.max_position_embeddings
    assert executor._sequences_of(2 * longest + 3) == [longest, longest, 3]
    executor.execute_dummy_batch(7)
    # Nothing of it is seen by requests.
    assert generate(executor, A, SamplingParams(), 4) == generate(executor, B, SamplingParams(), 4)


def test_health_is_that_of_the_device(executor, monkeypatch):
    assert executor.check_health() == [WorkerHealth(0, is_healthy=True)]

    def fail(*_, **__):
        raise RuntimeError("device lost")

    monkeypatch.setattr(torch, "ones", fail)
    assert executor.check_health() == [WorkerHealth(0, is_healthy=False, message="RuntimeError: device lost")]


def test_a_device_that_does_not_answer_is_unhealthy(executor, monkeypatch):
    if executor.max_concurrent_batches == 1:
        # Without a thread there is nobody who could wait.
        return
    monkeypatch.setattr("engine_core.model_executor.in_process_executor.HEALTH_TIMEOUT_S", 0.05)
    gate = threading.Event()
    executor._device_thread.submit(gate.wait)
    assert executor.check_health() == [WorkerHealth(0, is_healthy=False, message="no answer within 0 s")]
    gate.set()


def test_the_workers_of_one_host_share_its_memory_out(model_dir):
    settings = EngineSettings(
        model="m",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory="1MiB",
        tensor_parallel_size=2,
    )
    worker = InProcessExecutor(settings, model_dir, lambda _: None, OneProcessGroup(Place(1, 2, 1)))
    # One of the two key/value heads of each layer.
    assert worker.model_info.kv_bytes_per_token == 3 * 2 * 8 * 4
    assert worker.determine_num_blocks(BLOCK_SIZE) == (1 << 20) // (2 * BLOCK_SIZE * 3 * 2 * 8 * 4)
    assert worker.check_health() == [WorkerHealth(1, is_healthy=True)]


def test_a_profile_holds_the_steps(executor, tmp_path):
    executor.start_profile()
    executor.execute_dummy_batch(3)
    (path,) = executor.stop_profile(tmp_path, "mine")
    trace = json.loads(gzip.decompress(Path(path).read_bytes()))
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])
    with pytest.raises(InvariantViolation):
        executor.stop_profile(tmp_path, "")
    executor.start_profile()
    executor.shutdown()


def test_shutdown_twice_and_half_built(loaded):
    loaded.check_health()
    loaded.shutdown()
    loaded.shutdown()
    for call in (loaded.check_health, loaded.warm_up, lambda: loaded.sample_tokens(None)):
        with pytest.raises(InvariantViolation, match="shut down"):
            call()


def test_the_largest_step_fits_its_own_arrays(loaded):
    # On a GPU this step is what the size of the cache is found by; its shape must be legal for the model.
    loaded._run_largest_step(BLOCK_SIZE)
