"""The engine's model runner computes what transformers computes, however the scheduler cuts the work.

Steps are made by hand: whole prompts, chunks, decodes, mixed batches and prefix hits, on small random models of several
families, and on the embedded model. The scheduler itself has its own tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engine_core.config import EngineSettings
from engine_core.model_executor.kernels.choice import choose_kernels
from engine_core.model_executor.loader import load_model
from engine_core.model_executor.model_runner import ModelRunner
from engine_core.model_executor.models.backend import ModelBackend
from engine_core.model_executor.models.choice import choose_backend
from engine_core.model_executor.startup_error import StartupError
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import RequestKey, SamplingParams
from fakes.tiny_models import VOCAB_SIZE, load_reference, save_tiny_model, tiny_configs

pytestmark = pytest.mark.slow

BLOCK_SIZE = 4
# Two best tokens nearer than this may change places with the order of a sum.
NEAR_TIE = 1e-3


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads that wait for each other on a busy machine are ten times slower than one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class RecordingBackend:
    """Keeps the logits of the last step, as the sampler gets them."""

    def __init__(self, backend: ModelBackend) -> None:
        self._backend = backend
        self.name = backend.name
        self.vocab_size = backend.vocab_size
        self.layer_specs = backend.layer_specs
        self.layer_groups = backend.layer_groups
        self.logits = torch.empty(0)

    def forward(self, *arguments) -> torch.Tensor:
        logits = self._backend.forward(*arguments)
        self.logits = logits.clone()
        return logits


class Driver:
    """A model runner fed by hand: greedy requests, each with blocks of its own but for a shared prefix."""

    def __init__(self, directory: Path, model_impl: str, num_blocks: int = 400, cpu_kernels: str = "auto") -> None:
        settings = EngineSettings(model=str(directory), device="cpu", model_impl=model_impl, cpu_kernels=cpu_kernels)
        loaded = load_model(settings, directory, lambda _: None)
        kernels = choose_kernels(settings, loaded.device, loaded.dtype)
        self.backend = RecordingBackend(choose_backend(settings, loaded, kernels, None))
        self.runner = ModelRunner(self.backend, loaded.dtype, loaded.device, max_num_seqs=4, kernels=kernels)
        # Each group of layers has blocks of its own: those of the first one, shifted.
        self._num_blocks, self._num_groups = num_blocks, len(self.backend.layer_groups)
        self.runner.initialize_kv_cache(num_blocks * self._num_groups, BLOCK_SIZE)
        self._next_block = 1
        self._unsent: set[RequestKey] = set()
        self._computed: dict[RequestKey, int] = {}
        self._blocks: dict[RequestKey, list[int]] = {}
        self.known: dict[RequestKey, list[int]] = {}
        # The logits behind each output token.
        self.logits: dict[RequestKey, list[torch.Tensor]] = {}

    def add(self, prompt: list[int], *, like: RequestKey | None = None, num_cached: int = 0) -> RequestKey:
        """A request whose first `num_cached` tokens are in the blocks of another."""
        key = ("s", len(self.known))
        self._unsent.add(key)
        self._computed[key], self.known[key], self.logits[key] = num_cached, list(prompt), []
        self._blocks[key] = self._blocks[like][: num_cached // BLOCK_SIZE] if like else []
        return key

    def preempt(self, key: RequestKey) -> None:
        self._blocks[key], self._computed[key] = [], 0

    def step(self, scheduled: dict[RequestKey, int]) -> None:
        new, cached = [], []
        for key, count in scheduled.items():
            is_resumed = not self._blocks[key] and key not in self._unsent
            added = self._allocate(key, self._computed[key] + count)
            if key in self._unsent:
                new.append(self._new(key))
            else:
                cached.append(CachedRequestData(key, self._by_group(added), self._computed[key], is_resumed))
            self._unsent.discard(key)
            self._computed[key] += count
        self.runner.execute_model(SchedulerOutput(1, new, cached, scheduled, sum(scheduled.values()), []))
        rows = iter(self.backend.logits)
        output = self.runner.sample_tokens(None)
        for key, token_ids in zip(output.keys, output.sampled_token_ids, strict=True):
            self.known[key] += token_ids
            self.logits[key] += [next(rows) for _ in token_ids]

    def run(self, key: RequestKey, chunks: list[int], num_outputs: int) -> None:
        for count in chunks:
            self.step({key: count})
        while len(self.logits[key]) < num_outputs:
            self.step({key: 1})

    def _new(self, key: RequestKey) -> NewRequestData:
        blocks = self._by_group(self._blocks[key])
        return NewRequestData(
            key, list(self.known[key]), [], SamplingParams(temperature=0.0), 0, (), blocks, self._computed[key]
        )

    def _by_group(self, block_ids: list[int]) -> tuple[list[int], ...]:
        shifts = [group * self._num_blocks for group in range(self._num_groups)]
        return tuple([shift + block_id for block_id in block_ids] for shift in shifts)

    def _allocate(self, key: RequestKey, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_SIZE) - len(self._blocks[key])
        added = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        self._blocks[key] += added
        return added


def assert_equals_reference(reference: torch.nn.Module, driver: Driver, key: RequestKey) -> None:
    """Each output token is the arg-max of a plain forward pass over all tokens before it, with equal logits."""
    known, logits = torch.tensor(driver.known[key]), torch.stack(driver.logits[key])
    num_outputs = len(logits)
    with torch.inference_mode():
        expected = reference(known[None, :-1]).logits[0, -num_outputs:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    best = expected.topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] > NEAR_TIE
    assert clear.any()
    assert torch.equal(known[-num_outputs:][clear], best.indices[:, 0][clear])


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


# Experts, and attention with sinks; layers of another make.
NOT_NATIVE = {"gpt_oss", "phi"}


def test_what_the_native_decoder_does_not_know_is_left_to_transformers(tmp_path, caplog):
    directory = save_tiny_model(tmp_path, tiny_configs()["gpt_oss"])
    with caplog.at_level("WARNING"):
        assert Driver(directory, "auto").backend.name == "transformers"
    assert "Not native: no family of models it knows (gpt_oss)" in caplog.text
    with pytest.raises(StartupError, match="--model-impl native"):
        Driver(directory, "native")


@pytest.fixture(scope="module", params=list(tiny_configs()))
def directory(request, tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / request.param, tiny_configs()[request.param])


@pytest.fixture(scope="module")
def reference(directory) -> torch.nn.Module:
    return load_reference(directory)


@pytest.fixture(
    params=[("auto", "auto"), ("auto", "portable"), ("auto", "torch"), ("transformers", "auto")], ids="-".join
)
def driver(request, directory) -> Driver:
    model_impl, cpu_kernels = request.param
    driver = Driver(directory, model_impl, cpu_kernels=cpu_kernels)
    is_native = model_impl == "auto" and directory.name not in NOT_NATIVE
    assert driver.backend.name == ("native" if is_native else "transformers")
    return driver


@pytest.mark.parametrize("chunks", [[21], [5, 16], [1] * 21, [4, 4, 4, 4, 5]], ids=str)
def test_prefill_chunks_and_decode(reference, driver, chunks):
    key = driver.add(prompt(21, seed=1))
    driver.run(key, chunks, num_outputs=12)
    assert_equals_reference(reference, driver, key)


def test_mixed_batches(reference, driver):
    long, short, late = driver.add(prompt(40, 2)), driver.add(prompt(3, 3)), driver.add(prompt(18, 4))
    driver.step({short: 3, long: 10})
    driver.step({short: 1, long: 25, late: 7})
    driver.step({late: 11, short: 1, long: 5})
    for _ in range(6):
        driver.step({long: 1, late: 1, short: 1})
    for key in (long, short, late):
        assert_equals_reference(reference, driver, key)


def test_prefix_hit(reference, driver):
    shared = prompt(16, 5)
    first = driver.add(shared + prompt(5, 6))
    driver.run(first, [21], num_outputs=3)
    second = driver.add(shared + prompt(7, 7), like=first, num_cached=16)
    driver.run(second, [7], num_outputs=6)
    driver.run(first, [], num_outputs=8)
    assert_equals_reference(reference, driver, first)
    assert_equals_reference(reference, driver, second)


def test_preemption_and_recompute(reference, driver):
    key = driver.add(prompt(10, 8))
    driver.run(key, [10], num_outputs=5)
    driver.preempt(key)
    driver.run(key, [6, 9], num_outputs=10)
    assert_equals_reference(reference, driver, key)


TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "日本の首都は",
    "1, 2, 3, 4, 5,",
    "🙂🙂 Привет! ¿Qué tal?  ",
    "Once upon a time there was a small engine. " * 20,
]


@pytest.mark.parametrize(
    ("model_impl", "cpu_kernels"),
    [("native", "auto"), ("native", "portable"), ("native", "torch"), ("transformers", "auto")],
)
def test_embedded_model_greedy_equals_generate(embedded_model_dir, model_impl, cpu_kernels):
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)
    reference, driver = load_reference(embedded_model_dir), Driver(embedded_model_dir, model_impl, 600, cpu_kernels)
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    keys = [driver.add(token_ids) for token_ids in prompts]
    # All at once, their prompts in chunks of 16; each keeps decoding while the others still prefill.
    left = {key: len(token_ids) for key, token_ids in zip(keys, prompts, strict=True)}
    while any(len(driver.logits[key]) < 24 for key in keys):
        scheduled = {key: min(16, left[key]) or 1 for key in keys}
        left = {key: max(0, left[key] - 16) for key in keys}
        driver.step(scheduled)
    for key, token_ids in zip(keys, prompts, strict=True):
        input_ids = torch.tensor([token_ids])
        expected = reference.generate(
            input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=24, do_sample=False
        )[0, len(token_ids) :].tolist()
        output = driver.known[key][len(token_ids) :][: len(expected)]
        logits = torch.stack(driver.logits[key][: len(expected)]).topk(2, dim=-1).values
        near_ties = (logits[:, 0] - logits[:, 1] < NEAR_TIE).nonzero()
        agreed = int(near_ties[0]) if len(near_ties) else len(expected)
        assert agreed >= 5
        assert output[:agreed] == expected[:agreed]
