"""An executor that answers at once, with a token for every request: what is left is the cost of serving."""

from __future__ import annotations

import time
from concurrent.futures import Future

from engine_core.model_executor.device_thread import DeviceThread
from engine_core.model_executor.executor import ModelInfo
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.structured_output.bitmask import GrammarBitmask

# Ordinary words of the embedded model's vocabulary, one for each step in turn.
TOKENS = range(1000, 1256)


class InstantExecutor:
    """Notes the time from each answer to the next call. `has_thread`: answers come from another thread."""

    def __init__(self, vocab_size: int = 49_152, num_blocks: int = 1 << 14, *, has_thread: bool = False) -> None:
        self.gaps_s: list[float] = []
        self._has_thread = has_thread
        self._device_thread = DeviceThread(has_thread=has_thread)
        self.num_steps = 0
        self._vocab_size = vocab_size
        self._num_blocks = num_blocks
        self._answered: float | None = None
        self._output = ModelRunnerOutput([], [])

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            architecture="Instant",
            dtype="float32",
            vocab_size=self._vocab_size,
            implementation="instant",
            max_position_embeddings=8192,
            num_layers=1,
            kv_bytes_per_token=1,
            weight_bytes=0,
        )

    @property
    def max_concurrent_batches(self) -> int:
        return 2 if self._has_thread else 1

    def determine_num_blocks(self, block_size: int) -> int:
        return self._num_blocks

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        if self._answered is not None:
            self.gaps_s.append(time.perf_counter() - self._answered)
        token_id = TOKENS[self.num_steps % len(TOKENS)]
        self.num_steps += 1
        keys = list(scheduler_output.num_scheduled_tokens)
        # Every prompt fits one step, so every scheduled request samples.
        self._output = ModelRunnerOutput(keys, [[token_id] for _ in keys])

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        return self._device_thread.submit(self._answer, self._output)

    def _answer(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        self._answered = time.perf_counter()
        return output

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self._device_thread.shutdown()
