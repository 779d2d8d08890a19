"""An executor that answers at once, or at a fixed pace, with a token for every request: the cost of serving is left."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import Future

from engine_core.model_executor.executor import DeviceMemory, ModelInfo
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.structured_output.bitmask import GrammarBitmask

VOCAB_SIZE = 49_152
# Ordinary words and pieces of words of the embedded model's tokenizer, no special tokens.
FIRST_TOKEN, NUM_TOKENS = 300, 20_000


class InstantExecutor:
    """Notes the time from each answer to the next call, by the number of requests in it."""

    def __init__(self, num_blocks: int, step_s: float = 0.0) -> None:
        self.gaps_s: dict[int, list[float]] = defaultdict(list)
        self.num_steps = 0
        self._num_blocks = num_blocks
        self._step_s = step_s
        self._answered: float | None = None
        self._output = ModelRunnerOutput([], [])

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            architecture="Instant",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            implementation="instant",
            max_position_embeddings=4096,
            num_layers=1,
            kv_bytes_per_token=1,
            weight_bytes=0,
        )

    @property
    def max_concurrent_batches(self) -> int:
        return 1

    def determine_num_blocks(self, block_size: int) -> int:
        return self._num_blocks

    def device_memory(self) -> DeviceMemory:
        return DeviceMemory()

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        keys = list(scheduler_output.num_scheduled_tokens)
        if self._answered is not None:
            self.gaps_s[len(keys)].append(time.perf_counter() - self._answered)
        # Every prompt fits one step, so every scheduled request samples. Neighbours get different tokens.
        first = self.num_steps * 7919
        self.num_steps += 1
        token_ids = [[FIRST_TOKEN + (first + 31 * place) % NUM_TOKENS] for place in range(len(keys))]
        self._output = ModelRunnerOutput(keys, token_ids)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        if self._step_s:
            time.sleep(self._step_s)
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._output)
        self._answered = time.perf_counter()
        return future

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
