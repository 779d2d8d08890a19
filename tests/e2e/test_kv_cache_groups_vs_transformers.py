"""Models with sliding windows behind the real scheduler: what it gives back and hands out again must not show.

Small random models of several families, a cache too small for all requests, sequences many windows long, chunks, and
beginnings from the prefix cache; each token is checked against a plain forward pass of transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine_core.scheduler.request import Request
from fakes.tiny_engine import TinyEngine, greedy, prompt
from fakes.tiny_models import load_reference, save_tiny_model, tiny_configs

pytestmark = pytest.mark.slow

# Two best tokens nearer than this may change places with the order of a sum.
NEAR_TIE = 1e-3
NUM_OUTPUTS = 40
# Windows by group, with blocks of 4.
FAMILIES = {
    "mistral": [6],
    # Two softcapped layers with a window, one without.
    "gemma2": [5, 5, None],
    # Three with and two without: the smaller group leaves a tensor unused.
    "gemma3": [5, None],
    "qwen2": [None, 7, 7],
    "gpt_oss": [5, 5, None],
}


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads that wait for each other on a busy machine are ten times slower than one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(family, tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / family, tiny_configs()[family])


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(directory, request):
    engine = TinyEngine(directory, async_scheduling=request.param)
    yield engine
    engine.shutdown()


def assert_equals_reference(reference: torch.nn.Module, request: Request) -> None:
    """Each output token is the arg-max of a plain forward pass over all tokens before it."""
    known, num_outputs = torch.tensor(request.prompt_token_ids + request.output_token_ids), NUM_OUTPUTS
    assert len(request.output_token_ids) == num_outputs
    with torch.inference_mode():
        best = reference(known[None, :-1]).logits[0, -num_outputs:].topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] > NEAR_TIE
    assert clear.sum() > num_outputs // 2
    assert torch.equal(known[-num_outputs:][clear], best.indices[:, 0][clear])


def test_layers_are_grouped_by_their_window(engine, family):
    assert [group.sliding_window for group in engine.config.kv_cache_layout.groups] == FAMILIES[family]


def test_chunks_preemptions_and_cached_beginnings(directory, engine, family):
    reference = load_reference(directory)
    shared = prompt(22, seed=1)
    requests = [greedy(handle, shared + prompt(5 * handle + 1, seed=10 + handle), NUM_OUTPUTS) for handle in range(6)]
    engine.run(*requests)
    if None in FAMILIES[family]:
        assert engine.scheduler.stats().num_preemptions > 0
    # Again, from what is left in the cache of the last ones.
    again = [greedy(10 + handle, requests[handle].prompt_token_ids, NUM_OUTPUTS) for handle in (5, 4)]
    hits = engine.scheduler.stats().prefix_hit_tokens
    engine.run(*again)
    assert engine.scheduler.stats().prefix_hit_tokens > hits
    for request in requests + again:
        assert_equals_reference(reference, request)


def test_a_long_generation_holds_no_more_than_its_window(engine, family):
    """Blocks of a sliding-window group are given back as the sequence goes on."""
    layout = engine.config.kv_cache_layout
    engine.run(greedy(1, prompt(20, seed=3), 100))
    assert engine.most_blocks <= layout.most_blocks(120)
    num_full = FAMILIES[family].count(None)
    assert layout.most_blocks(120) == 30 * num_full + sum(
        (window - 1 + 12 - 2) // 4 + 2 for window in FAMILIES[family] if window
    )


def test_a_context_longer_than_the_cache_fits_behind_a_window(tmp_path):
    """10 blocks of 4 tokens, and a sequence of 120: only the window has to fit."""
    directory = save_tiny_model(tmp_path / "mistral", tiny_configs()["mistral"])
    engine = TinyEngine(directory, num_blocks=11, max_model_len=-1)
    assert engine.config.max_model_len == 128
    assert engine.config.kv_cache_tokens > 128
    request = greedy(1, prompt(80, seed=4), NUM_OUTPUTS)
    engine.run(request)
    assert_equals_reference(load_reference(directory), request)
    engine.shutdown()
