"""The executor around a tiny model: facts, life cycle, and a seeded generation that survives a preemption."""

from __future__ import annotations

import pytest

from engine_core.config import EngineSettings
from engine_core.model_executor.executor import ModelInfo
from engine_core.model_executor.in_process_executor import InProcessExecutor
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import SamplingParams
from fakes.tiny_models import save_tiny_model, tiny_configs
from stepwire.errors import InvariantViolation

A, B = ("s", 1), ("s", 2)
PROMPT = [5, 6, 7, 8, 9]
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("executor") / "llama", tiny_configs()["llama"])


@pytest.fixture
def loaded(model_dir):
    settings = EngineSettings(
        model="m", device="cpu", max_num_seqs=4, max_num_batched_tokens=64, block_size=BLOCK_SIZE, num_blocks=50
    )
    executor = InProcessExecutor(settings, model_dir, lambda _: None)
    yield executor
    executor.shutdown()


@pytest.fixture
def executor(loaded):
    loaded.initialize_kv_cache(loaded.determine_num_blocks(BLOCK_SIZE), BLOCK_SIZE)
    loaded.warm_up()
    return loaded


def new(key, sampling, *, prompt=PROMPT, output=(), blocks=range(1, 10), computed=0) -> NewRequestData:
    return NewRequestData(key, list(prompt), list(output), sampling, 0, (), list(blocks), computed)


def step(executor, scheduled, *, new=(), cached=(), finished=()) -> dict:
    total = sum(scheduled.values())
    executor.execute_model(SchedulerOutput(1, list(new), list(cached), scheduled, total, list(finished)))
    result = executor.sample_tokens(None).result(timeout=0)
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
    assert loaded.model_info == ModelInfo(
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=211,
        max_position_embeddings=128,
        num_layers=3,
        kv_bytes_per_token=3 * 2 * 2 * 8 * 4,
        weight_bytes=loaded.model_info.weight_bytes,
    )
    assert loaded.model_info.weight_bytes > 0
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
    resumed = CachedRequestData(A, [20, 21, 22, 23], 0, is_resumed=True)
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
        loaded.execute_model(empty)
    with pytest.raises(InvariantViolation):
        loaded.sample_tokens(None)
    loaded.initialize_kv_cache(5, BLOCK_SIZE)
    loaded.execute_model(empty)
    with pytest.raises(InvariantViolation):
        loaded.execute_model(empty)


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
