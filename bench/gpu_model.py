"""Models of real shapes with random weights, made on the device without any file, and driven step by step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine_core.config import EngineSettings
from engine_core.model_executor.attention import transformers_interface
from engine_core.model_executor.decode_graphs import decode_graphs_for
from engine_core.model_executor.kernels.choice import choose_kernels
from engine_core.model_executor.loader import LoadedModel
from engine_core.model_executor.model_runner import ModelRunner
from engine_core.model_executor.models.choice import choose_backend
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from engine_core.scheduler.request import RequestKey, SamplingParams

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of the Llama family. `num_steps`: how many steps a figure is the mean of."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    num_steps: int = 30
    prompts: tuple[int, ...] = (2048,) * 4

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.is_tied,
            max_position_embeddings=8192,
            bos_token_id=1,
            eos_token_id=2,
        )

    @property
    def num_multiplied(self) -> int:
        """Parameters that every token is multiplied with, in the layers."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_read(self) -> int:
        """Parameters that a decode step reads: the layers and the head; of the embedding only rows."""
        return self.num_multiplied + self.vocab_size * self.hidden_size

    def prefill_flop(self, prompts: Sequence[int]) -> float:
        """Products of the layers and causal attention over whole prompts, and the head for the last token of each."""
        attention = sum(2 * length * length * self.num_heads * self.head_dim for length in prompts) * self.num_layers
        return 2.0 * self.num_multiplied * sum(prompts) + attention + 2.0 * self.vocab_size * self.hidden_size


LLAMA_1B = Shape("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 64, 128_256, is_tied=True)
LLAMA_8B = Shape("Llama-3.1-8B", 4096, 14_336, 32, 32, 8, 128, 128_256, is_tied=False)
TINY = Shape("tiny", 64, 128, 2, 4, 2, 16, 49_152, is_tied=True, num_steps=3, prompts=(40, 24))


def random_module(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.nn.Module:
    transformers_interface.register()
    torch.manual_seed(seed)
    from_config: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        module: torch.nn.Module = from_config(
            shape.config(), dtype=dtype, attn_implementation=transformers_interface.NAME
        )
    return module.eval()


class SteppedModel:
    """What an engine puts together around a loaded model, without scheduler and files. One batch at a time."""

    def __init__(
        self, shape: Shape, module: torch.nn.Module, max_num_seqs: int, num_blocks: int, **settings: object
    ) -> None:
        parameter = next(module.parameters())
        self.device, self.shape = parameter.device, shape
        given = {"model": shape.name, "device": self.device.type, "max_num_seqs": max_num_seqs, **settings}
        engine_settings = EngineSettings(**given)  # type: ignore[arg-type]  # settings by name
        loaded = LoadedModel(module, module.config, parameter.dtype, self.device, range(shape.num_layers))
        kernels = choose_kernels(engine_settings, self.device, parameter.dtype)
        backend = choose_backend(engine_settings, loaded, kernels, None)
        self.runner = ModelRunner(backend, parameter.dtype, self.device, max_num_seqs, kernels)
        self.runner.graphs = decode_graphs_for(engine_settings, loaded, backend, kernels, None)
        self.runner.initialize_kv_cache(num_blocks, BLOCK_SIZE)
        self.runner.record_graphs(BLOCK_SIZE, lambda _: None)
        self._num_blocks = num_blocks
        self._numbers = itertools.count()
        self._keys: list[RequestKey] = []

    def begin(self, prompts: Sequence[Sequence[int]], num_outputs: int) -> list[int]:
        """All prompts in one step, and the first token of each; the batch before is forgotten."""
        finished, self._keys = self._keys, [("bench", next(self._numbers)) for _ in prompts]
        new, next_block = [], 1
        for key, prompt in zip(self._keys, prompts, strict=True):
            end = next_block + -(-(len(prompt) + num_outputs) // BLOCK_SIZE)
            blocks = (list(range(next_block, end)),)
            new.append(NewRequestData(key, list(prompt), [], SamplingParams(temperature=0.0), 0, (), blocks, 0))
            next_block = end
        if next_block > self._num_blocks:
            raise ValueError(f"{next_block} blocks are needed and {self._num_blocks} are there")
        return self._step(new, [len(prompt) for prompt in prompts], finished)

    def decode(self) -> list[int]:
        """One token more of each."""
        return self._step([], [1] * len(self._keys), [])

    def repeat(self) -> None:
        """The latest decode step once more, by the device alone where it is recorded."""
        if self.runner.graphs is not None:
            self.runner.graphs.repeat(len(self._keys))
        else:
            self.decode()

    def _step(self, new: list[NewRequestData], counts: list[int], finished: list[RequestKey]) -> list[int]:
        scheduled = dict(zip(self._keys, counts, strict=True))
        self.runner.execute_model(SchedulerOutput(1, new, [], scheduled, sum(counts), finished))
        return [token_ids[0] for token_ids in self.runner.sample_tokens(None).sampled_token_ids]


def prompts_of(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    return [[(7919 * (index + 1) * (place + 1)) % vocab_size for place in range(n)] for index, n in enumerate(lengths)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Seconds of what the device does within a `with`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        synchronize(self._device)
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        synchronize(self._device)
        self.seconds = time.perf_counter() - self._started
