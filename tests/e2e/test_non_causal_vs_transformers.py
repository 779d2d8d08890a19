"""A model whose prompt tokens all see each other: whole prompts in one step, no part of one from a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_core.model_executor.startup_error import StartupError
from engine_core.scheduler.request import Request
from fakes.tiny_engine import TinyEngine, greedy, prompt
from fakes.tiny_models import load_reference, save_tiny_model, tiny_configs

pytestmark = pytest.mark.slow

# Room for the longest prompt in one step.
BUDGET = 128


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads that wait for each other on a busy machine are ten times slower than one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    config = tiny_configs()["llama"]
    config.is_causal = False
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "mutual", config)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(directory, request):
    engine = TinyEngine(directory, max_num_batched_tokens=BUDGET, num_blocks=33, async_scheduling=request.param)
    yield engine
    engine.shutdown()


def expected(directory: Path, request: Request) -> list[int]:
    """What transformers generates: the prompt in one forward pass, then token by token with its KV cache."""
    input_ids = torch.tensor([request.prompt_token_ids])
    output = load_reference(directory).generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=request.stop.max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0, input_ids.shape[1] :].tolist()


def test_greedy_tokens_survive_preemption(directory, engine):
    """The recompute of a preempted request must not let its prompt see its output."""
    requests = [greedy(handle, prompt(12 + 5 * handle, seed=20 + handle), 24) for handle in range(4)]
    engine.run(*requests)
    assert engine.scheduler.stats().num_preemptions > 0
    for request in requests:
        assert request.output_token_ids == expected(directory, request)


def test_a_resumed_generation_goes_on_as_it_would_have(directory, engine):
    whole = greedy(1, prompt(15, seed=30), 20)
    tokens = expected(directory, whole)
    resumed = greedy(2, whole.prompt_token_ids, 20)
    resumed.output_token_ids[:], resumed.num_resumed_tokens = tokens[:7], 7
    engine.run(resumed)
    assert resumed.output_token_ids == tokens


def test_chunked_prefill_and_prefix_caching_are_off(engine):
    assert not engine.config.model_info.is_causal
    assert not engine.config.enable_chunked_prefill
    assert not engine.config.enable_prefix_caching
    engine.run(greedy(1, prompt(20, seed=1), 2))
    engine.run(greedy(2, prompt(20, seed=1), 2))
    assert engine.scheduler.stats().prefix_hit_tokens == 0


def test_a_causal_model_says_something_else(directory, tmp_path):
    """Else the tests above would show nothing."""
    causal = save_tiny_model(tmp_path / "causal", tiny_configs()["llama"])
    request = greedy(1, prompt(20, seed=20), 24)
    assert expected(causal, request) != expected(directory, request)


def test_a_budget_below_the_longest_prompt_is_a_start_up_error(directory):
    with pytest.raises(StartupError, match="not causal needs --max-num-batched-tokens of at least"):
        TinyEngine(directory, max_num_batched_tokens=64, num_blocks=40)
