"""A model with its KV cache, driven step by step without scheduler, sockets or threads."""

from __future__ import annotations

import time
from pathlib import Path

from bench import engine_flags
from engine_core.__main__ import load_model
from engine_core.model_executor.model_source import resolve_model
from engine_core.scheduler.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine_core.scheduler.request import SamplingParams

SESSION = "bench"
BLOCK_SIZE = 16


class LoadedModel:
    """One batch at a time: every request begins with a prompt and then decodes in step with the others."""

    def __init__(self, **changes: object) -> None:
        settings = engine_flags.settings(async_scheduling=False, block_size=BLOCK_SIZE, **changes)
        loaded = load_model(settings, lambda error: None, lambda text: None)
        self.path: Path = resolve_model(settings, lambda text: None).path
        self._executor = loaded.executor
        self._executor.initialize_kv_cache(self._executor.determine_num_blocks(BLOCK_SIZE), BLOCK_SIZE)
        self._executor.warm_up()
        self._step = 0
        self._finished: list[tuple[str, int]] = []

    def begin(self, prompts: list[list[int]], num_output_tokens: int) -> float:
        """Compute the prompts in one step; returns its seconds. What ran before is dropped."""
        self._keys = [(SESSION, self._step * 1000 + index) for index in range(len(prompts))]
        new, next_block = [], 1
        for key, prompt in zip(self._keys, prompts, strict=True):
            num_blocks = -(-(len(prompt) + num_output_tokens) // BLOCK_SIZE)
            block_ids = (list(range(next_block, next_block + num_blocks)),)
            next_block += num_blocks
            new.append(NewRequestData(key, prompt, [], SamplingParams(temperature=0.0), 0, (), block_ids, 0))
        seconds = self._run(new, [len(prompt) for prompt in prompts])
        self._finished = list(self._keys)
        return seconds

    def decode(self) -> float:
        """One token more for every request; returns the step's seconds."""
        return self._run([], [1] * len(self._keys))

    @property
    def weight_bytes(self) -> int:
        return self._executor.model_info.weight_bytes

    def close(self) -> None:
        self._executor.shutdown()

    def _run(self, new: list[NewRequestData], num_tokens: list[int]) -> float:
        self._step += 1
        scheduled = dict(zip(self._keys, num_tokens, strict=True))
        finished, self._finished = (self._finished, []) if new else ([], self._finished)
        step = SchedulerOutput(self._step, new, [], scheduled, sum(num_tokens), finished)
        started = time.perf_counter()
        self._executor.execute_model(step)
        output: ModelRunnerOutput = self._executor.sample_tokens(None).result()
        seconds = time.perf_counter() - started
        if any(len(tokens) != 1 for tokens in output.sampled_token_ids):
            raise ValueError("a request of the batch did not get its token")
        return seconds
