"""Log-probabilities of the engine core equal log_softmax of transformers' logits within 1e-3.

Whatever cuts the work: whole prompts, chunks of 16, preemption in a tiny cache, prefix hits of neighbours. On small
random models of several families (soft caps, windows), and on the embedded model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from core_driver import CoreDriver
from engine_core.scheduler.request import LogprobsParams, RequestKey, SamplingParams
from fakes.tiny_models import VOCAB_SIZE, load_reference, save_tiny_model, tiny_configs
from stepwire.packed_logprobs import PackedLogprobs

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3
NUM_TOP = 5
CHOSEN = (7, 3, 200)
ALL = LogprobsParams(NUM_TOP, NUM_TOP, CHOSEN)
PROMPT_ONLY = LogprobsParams(num_prompt=0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Reference:
    """The model in plain transformers: one forward pass over prompt and answer says everything."""

    def __init__(self, model_dir: Path) -> None:
        self._model: Any = load_reference(model_dir)

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Row i: of the token after the first i + 1 tokens."""
        logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits.double().log_softmax(dim=-1)


def assert_rows(rows: PackedLogprobs, own: list[int], num_top: int, chosen: tuple[int, ...], expected: torch.Tensor):
    rows.require_rows(len(own))
    assert rows.width == 1 + num_top + len(chosen)
    ids, values, ranks = rows.unpack()
    found = torch.tensor(values, dtype=torch.float64).view(len(own), rows.width)
    columns = torch.tensor(ids).view(len(own), rows.width)
    assert columns[:, 0].tolist() == own
    # Each value belongs to its id.
    torch.testing.assert_close(found, expected.gather(1, columns), rtol=0, atol=TOLERANCE)
    # The top ones are the largest there are, most likely first, and the chosen ones are those asked for.
    top = found[:, 1 : 1 + num_top]
    torch.testing.assert_close(top, expected.topk(num_top, dim=-1).values, rtol=0, atol=TOLERANCE)
    assert (top.diff(dim=-1) <= 0).all()
    assert all(tuple(row) == chosen for row in columns[:, 1 + num_top :].tolist())
    own_values = expected.gather(1, columns[:, :1])
    at_least = (expected > own_values + TOLERANCE).sum(dim=-1) + 1
    at_most = (expected > own_values - TOLERANCE).sum(dim=-1) + 1
    rank = torch.tensor(ranks)
    assert ((at_least <= rank) & (rank <= at_most)).all()


def assert_equals_reference(driver: CoreDriver, key: RequestKey, prompt: list[int], reference: Reference) -> None:
    params, output = driver.logprobs_params[key], driver.tokens[key]
    expected = reference.logprobs([*prompt, *output[:-1]])
    if params.has_output:
        rows = PackedLogprobs.join(driver.logprobs[key])
        assert_rows(rows, output, params.num_output or 0, params.chosen_token_ids, expected[len(prompt) - 1 :])
    else:
        assert driver.logprobs[key] == []
    if params.num_prompt is not None and len(prompt) > 1:
        rows = PackedLogprobs.join(driver.prompt_logprobs[key])
        assert_rows(rows, prompt[1:], params.num_prompt, (), expected[: len(prompt) - 1])
    else:
        assert driver.prompt_logprobs[key] == []


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", list(tiny_configs()))
def test_every_family_in_chunks(family: str, tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / family, tiny_configs()[family])
    driver = CoreDriver(directory, num_blocks=60, max_num_batched_tokens=16, max_num_seqs=4, block_size=4)
    prompts = [random_prompt(length, seed) for seed, length in enumerate([1, 2, 40, 23])]
    params = [ALL, ALL, ALL, LogprobsParams(num_prompt=2)]
    keys = [driver.add(prompt, 6, logprobs=one) for prompt, one in zip(prompts, params, strict=True)]
    driver.run()
    reference = Reference(directory)
    for key, prompt in zip(keys, prompts, strict=True):
        assert_equals_reference(driver, key, prompt, reference)
    driver.core.shutdown()


TEXTS = [
    "a",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "日本の首都は 🙂",
    "1, 2, 3, 4, 5,",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "In computer science, paging is a memory management scheme. " * 12,
]


@pytest.fixture(scope="module")
def prompts(embedded_model_dir: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(embedded_model_dir)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def reference(embedded_model_dir: Path) -> Reference:
    return Reference(embedded_model_dir)


@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({"num_blocks": 400}, False),
        ({"num_blocks": 400, "max_num_batched_tokens": 16, "max_num_seqs": 16}, False),
        # The longest prompt fits with its answer, and little beside it; chunks, so that prefills are cut off too.
        ({"num_blocks": 13, "max_num_batched_tokens": 16, "max_num_seqs": 16}, True),
    ],
    ids=["whole", "chunks of 16", "preemption"],
)
def test_embedded_model(
    embedded_model_dir: Path,
    reference: Reference,
    prompts: list[list[int]],
    settings: dict[str, object],
    preempts: bool,
) -> None:
    driver = CoreDriver(embedded_model_dir, **settings)
    asked = [ALL, PROMPT_ONLY, LogprobsParams(0), ALL, LogprobsParams(3, 4), ALL, ALL]
    sampled = SamplingParams(temperature=1.0, top_k=20, frequency_penalty=0.5, seed=5)
    keys = [
        driver.add(prompt, 24, SamplingParams(temperature=0.0) if index % 2 else sampled, logprobs=params)
        for index, (prompt, params) in enumerate(zip(prompts, asked, strict=True))
    ]
    driver.run()
    assert (driver.core.scheduler.stats().num_preemptions > 0) is preempts
    for key, prompt in zip(keys, prompts, strict=True):
        assert_equals_reference(driver, key, prompt, reference)
    driver.core.shutdown()


def test_a_prompt_in_the_cache_gives_all_its_rows(
    embedded_model_dir: Path, reference: Reference, prompts: list[list[int]]
) -> None:
    driver = CoreDriver(embedded_model_dir, num_blocks=100)
    prompt = prompts[-1]
    for params in (ALL, ALL, LogprobsParams(2)):
        key = driver.add(prompt, 4, logprobs=params)
        driver.run()
        assert_equals_reference(driver, key, prompt, reference)
    # Only the last one read the cache, which the first had filled.
    assert driver.core.scheduler.stats().prefix_hit_tokens == 16 * ((len(prompt) - 1) // 16)
    driver.core.shutdown()


def test_whole_vocabulary_and_resumed_output(
    embedded_model_dir: Path, reference: Reference, prompts: list[list[int]]
) -> None:
    driver = CoreDriver(embedded_model_dir, num_blocks=100, max_logprobs=-1)
    prompt = prompts[1]
    key = driver.add(prompt, 3, logprobs=LogprobsParams(-1, -1))
    driver.run()
    vocab_size = driver.core.config.model_info.vocab_size
    expected = reference.logprobs([*prompt, *driver.tokens[key][:-1]])
    assert_rows(PackedLogprobs.join(driver.logprobs[key]), driver.tokens[key], vocab_size, (), expected[-3:])
    rows = PackedLogprobs.join(driver.prompt_logprobs[key])
    assert_rows(rows, prompt[1:], vocab_size, (), expected[: len(prompt) - 1])
    resumed = driver.add(prompt, 3, logprobs=LogprobsParams(2), resumed=driver.tokens[key][:2])
    driver.run()
    assert driver.tokens[resumed] == driver.tokens[key][2:]
    assert_rows(PackedLogprobs.join(driver.logprobs[resumed]), driver.tokens[resumed], 2, (), expected[-1:])
    driver.core.shutdown()
