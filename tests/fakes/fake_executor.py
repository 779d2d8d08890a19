"""An executor without a model: the next token is a pure function of the known tokens. Obeys the Executor contract.

It keeps a worker's state from SchedulerOutput alone, as a real one must, so that a scheduler that forgets to send a
block or a token shows up as a wrong answer.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from engine_core.config import EngineSettings
from engine_core.model_executor.device_thread import DeviceThread
from engine_core.model_executor.executor import (
    DeviceMemory,
    FailureCallback,
    MemoryPart,
    ModelInfo,
    ModelWork,
    WeightTensor,
    WorkerHealth,
)
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.pooling import PoolingParams
from engine_core.scheduler.request import LogprobsParams, RequestKey
from engine_core.structured_output.bitmask import GrammarBitmask
from engine_core.structured_output.vocabulary import Vocabulary
from fakes.fake_pooling import HIDDEN_SIZE, fake_vector
from fakes.worker_logprobs import fake_prompt, fake_sampled

VOCAB_SIZE = 512
# A prompt that starts with one of these makes the step fail or hang; for tests of death and of the watchdog.
POISON_TOKEN = 500
HANG_TOKEN = 501
# Makes the executor report a failure through its callback, from another thread, while the step itself goes well.
CALLBACK_TOKEN = 503
# With --check-nan: the logits of such a prompt have NaN, those of every step.
NAN_TOKEN = 504
# Each step that computes for such a prompt takes this long, or as long as told, as a real model would; for drains.
SLOW_TOKEN = 502
SLOW_STEP_S = 0.005
# A dummy batch of this size fails.
FAILING_BATCH = 13


# Printable ASCII and the line feed are their own ids, and some ids are words; the rest has no text.
_WORDS = {200: b"ab", 201: b"yes", 202: b'{"', 203: "é".encode(), 204: b"\xc3", 205: b"\xa9", 206: b"  "}
FAKE_VOCABULARY = Vocabulary(
    tuple(_WORDS.get(i, bytes([i]) if 32 <= i < 127 or i == 10 else b"") for i in range(VOCAB_SIZE))
)
# The same with a token for each byte, so that every grammar has a way on.
_OTHER_BYTES = [byte for byte in range(256) if not 32 <= byte < 127 and byte != 10]
_BYTE_TOKENS = {300 + place: bytes([byte]) for place, byte in enumerate(_OTHER_BYTES)}
WHOLE_VOCABULARY = Vocabulary(tuple(_BYTE_TOKENS.get(i, token) for i, token in enumerate(FAKE_VOCABULARY.tokens)))

# What it says that a token costs.
FAKE_WORK = ModelWork(num_matrix_params=100, num_head_params=10, attention_width=2, layer_bytes=400, head_bytes=40)

# Never looked at: answers do not depend on them.
FAKE_WEIGHTS = {"embed": np.zeros((4, 2), np.float32), "head": np.zeros(3, np.float32)}
FAKE_WEIGHTS_BYTES = {name: values.tobytes() for name, values in FAKE_WEIGHTS.items()}


def next_token(token_ids: list[int]) -> int:
    """What the fake model says after these tokens: never eos (2), never a poison."""
    return 3 + (sum(token_ids) * 31 + len(token_ids) * 7) % 400


def allowed_token(token_ids: list[int], words: np.ndarray) -> int:
    """The same within a grammar: the next id from there on that its mask allows; any id when it allows none."""
    start = next_token(token_ids)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return int(min(allowed, key=lambda token_id: (token_id - start) % VOCAB_SIZE, default=start))


class FakeExecutor:
    """Computes answers from token ids; `gate` holds steps back until it is set."""

    def __init__(self, settings: EngineSettings, failure_callback: FailureCallback) -> None:
        self.failure_callback = failure_callback
        self.gate = threading.Event()
        self.gate.set()
        self.slow_step_s = SLOW_STEP_S
        # Without, any prompt may be sent.
        self.has_poisons = True
        self.checks_nan = settings.check_nan
        self.is_shut_down = False
        self.finished_keys: list[RequestKey] = []
        self.scheduler_outputs: list[SchedulerOutput] = []
        self.num_dummy_tokens: list[int] = []
        self.released: set[MemoryPart] = set()
        self.memory = DeviceMemory(free_bytes=3000)
        self.num_looks = 0
        self.weights = dict(FAKE_WEIGHTS_BYTES)
        self.can_change_weights = True
        self.loaded_from: list[Path] = []
        # Raised by the next change of the weights.
        self.weight_failure: Exception | None = None
        self._is_profiling = False
        self._num_blocks = settings.num_blocks or 1024
        self._token_ids: dict[RequestKey, list[int]] = {}
        self._num_computed: dict[RequestKey, int] = {}
        self._prompts: dict[RequestKey, list[int]] = {}
        self._logprobs: dict[RequestKey, LogprobsParams] = {}
        self._pooling: dict[RequestKey, PoolingParams] = {}
        self._device_thread = DeviceThread(has_thread=settings.async_scheduling)
        self._max_concurrent_batches = 2 if settings.async_scheduling else 1
        # Of the step that was started: computed tokens before and after it, by request.
        self._forward: Future[dict[RequestKey, tuple[int, int]]] | None = None

    @property
    def model_info(self) -> ModelInfo:
        return ModelInfo(
            architecture="FakeForCausalLM",
            dtype="float32",
            implementation="fake",
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=4096,
            num_layers=1,
            kv_bytes_per_token=4,
            weight_bytes=0,
            hidden_size=HIDDEN_SIZE,
            work=FAKE_WORK,
        )

    @property
    def max_concurrent_batches(self) -> int:
        return self._max_concurrent_batches

    @property
    def num_known_requests(self) -> int:
        return len(self._token_ids)

    def determine_num_blocks(self, block_size: int) -> int:
        return self._num_blocks

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._forward = self._device_thread.submit(self._run_forward, scheduler_output)

    def _run_forward(self, scheduler_output: SchedulerOutput) -> dict[RequestKey, tuple[int, int]]:
        self.gate.wait()
        if scheduler_output.num_scheduled_tokens:
            self._require_memory()
        self.scheduler_outputs.append(scheduler_output)
        self.finished_keys += scheduler_output.finished_keys
        for key in scheduler_output.finished_keys:
            del self._token_ids[key], self._prompts[key], self._logprobs[key], self._num_computed[key]
            self._pooling.pop(key, None)
        for new in scheduler_output.new_requests:
            self._token_ids[new.key] = [*new.prompt_token_ids, *new.output_token_ids]
            self._prompts[new.key], self._logprobs[new.key] = new.prompt_token_ids, new.logprobs
            self._num_computed[new.key] = new.num_computed_tokens
            if new.pooling is not None:
                self._pooling[new.key] = new.pooling
            if self.has_poisons:
                self._swallow(new.prompt_token_ids[0])
        for cached in scheduler_output.cached_requests:
            self._num_computed[cached.key] = cached.num_computed_tokens
        scheduled = scheduler_output.num_scheduled_tokens
        if any(self._token_ids[key][0] == SLOW_TOKEN for key in scheduled):
            threading.Event().wait(self.slow_step_s)
        pending = {key: (self._num_computed[key], self._num_computed[key] + n) for key, n in scheduled.items()}
        self._num_computed.update((key, end) for key, (_, end) in pending.items())
        return pending

    def _swallow(self, token_id: int) -> None:
        if token_id == POISON_TOKEN:
            raise RuntimeError("poisoned prompt")
        if token_id == CALLBACK_TOKEN:
            error = RuntimeError("a worker died")
            threading.Thread(target=self.failure_callback, args=(error,)).start()
        if token_id == HANG_TOKEN:
            threading.Event().wait()

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> Future[ModelRunnerOutput]:
        if self._forward is None:
            raise RuntimeError("sample_tokens without execute_model")
        forward, self._forward = self._forward, None
        return self._device_thread.submit(self._run_sampling, forward, bitmask)

    def _run_sampling(
        self, forward: Future[dict[RequestKey, tuple[int, int]]], bitmask: GrammarBitmask | None
    ) -> ModelRunnerOutput:
        pending = forward.result()
        words = {} if bitmask is None else dict(zip(bitmask.keys, bitmask.words, strict=True))
        output = ModelRunnerOutput(list(pending), [])
        for key, (start, end) in pending.items():
            self._compute(output, key, start, end, words.get(key))
        return output

    def _compute(
        self, output: ModelRunnerOutput, key: RequestKey, start: int, end: int, words: np.ndarray | None
    ) -> None:
        if key in self._pooling:
            output.sampled_token_ids.append([])
            if end == len(self._prompts[key]):
                output.pooled[key] = fake_vector(self._prompts[key], self._pooling[key])
            return
        sampled = self._sample(key, end, words)
        if sampled and self.checks_nan and self._prompts[key][0] == NAN_TOKEN:
            output.nan_keys.append(key)
        output.sampled_token_ids.append(sampled)
        rows = fake_sampled(self._logprobs[key], sampled[0], len(self._token_ids[key]) - 1) if sampled else None
        if rows is not None:
            output.logprobs[key] = rows
        prompt_rows = fake_prompt(self._logprobs[key], self._prompts[key], start, end)
        if prompt_rows is not None:
            output.prompt_logprobs[key] = prompt_rows

    def _sample(self, key: RequestKey, num_computed: int, words: np.ndarray | None) -> list[int]:
        token_ids = self._token_ids[key]
        if num_computed < len(token_ids):
            return []
        token_ids.append(next_token(token_ids) if words is None else allowed_token(token_ids, words))
        return token_ids[-1:]

    def execute_dummy_batch(self, num_tokens: int) -> None:
        if num_tokens == FAILING_BATCH:
            raise RuntimeError("no such batch")
        self._require_memory()
        self.num_dummy_tokens.append(num_tokens)

    def check_health(self) -> list[WorkerHealth]:
        return [WorkerHealth(0, is_healthy=True), WorkerHealth(1, is_healthy=False, message="it does not answer")]

    def device_memory(self) -> DeviceMemory:
        self.num_looks += 1
        return self.memory

    def release_memory(self, part: MemoryPart) -> int:
        self.released.add(part)
        return 1000

    def restore_memory(self, part: MemoryPart) -> None:
        self.released.discard(part)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: np.shape(values) for name, values in FAKE_WEIGHTS.items()}

    def update_weights(self, tensors: list[WeightTensor]) -> None:
        if self.weight_failure is not None:
            raise self.weight_failure
        self.weights.update({tensor.name: bytes(tensor.data) for tensor in tensors})

    def load_weights(self, directory: Path) -> int:
        if self.weight_failure is not None:
            raise self.weight_failure
        self.loaded_from.append(directory)
        self.weights = dict(FAKE_WEIGHTS_BYTES)
        return sum(map(len, self.weights.values()))

    def discard_weights(self) -> int:
        self.weights = {}
        return 500

    def start_profile(self) -> None:
        self._is_profiling = True

    def stop_profile(self, directory: Path, prefix: str) -> list[str]:
        assert self._is_profiling
        self._is_profiling = False
        path = directory / f"{prefix or 'trace'}-0.json"
        path.write_text("{}")
        return [str(path)]

    def _require_memory(self) -> None:
        if self.released or not self.weights:
            raise RuntimeError("the model was run without its memory")

    def shutdown(self) -> None:
        self._device_thread.shutdown()
        self.is_shut_down = True
