"""How the workers of one model agree on tokens: the leader samples and tells the others, which compute no logits.

If each worker sampled for itself, one rounding that differs between two devices would let their records drift apart
unnoticed. A worker takes a step's tokens up only when a later step needs them, so that the first stage of a pipeline
can begin with other requests meanwhile. Owner: the main thread of a worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from engine_core.model_executor.kernels.interface import Kernels
from engine_core.model_executor.loader import LoadedModel
from engine_core.model_executor.model_runner import ModelRunner
from engine_core.model_executor.models.backend import ModelBackend
from engine_core.model_executor.parallel.worker_group import WorkerGroup
from engine_core.model_executor.step_inputs import StepInputs
from engine_core.scheduler.output import ModelRunnerOutput, PromptLogprobs, SchedulerOutput
from engine_core.scheduler.request import RequestKey
from engine_core.structured_output.bitmask import GrammarBitmask


def make_runner(
    backend: ModelBackend, loaded: LoadedModel, max_num_seqs: int, kernels: Kernels, group: WorkerGroup | None
) -> ModelRunner:
    """The runner that fits the worker's place."""
    if group is None:
        return ModelRunner(backend, loaded.dtype, loaded.device, max_num_seqs, kernels)
    kind = LeadingRunner if group.place.is_leader else FollowingRunner
    return kind(backend, loaded.dtype, loaded.device, max_num_seqs, kernels, group)


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """Tokens of a step on their way; the tensor has to live until the work is done."""

    work: torch.distributed.Work
    # int64 [S], in the order of the step's sampled sequences.
    token_ids: torch.Tensor


class LeadingRunner(ModelRunner):
    """Samples for all."""

    def __init__(
        self,
        backend: ModelBackend,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
        kernels: Kernels,
        group: WorkerGroup,
    ) -> None:
        super().__init__(backend, dtype, device, max_num_seqs, kernels)
        self._group = group
        self._telling: _Broadcast | None = None

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        output = super().sample_tokens(bitmask)
        token_ids = torch.tensor([token_id for sampled in output.sampled_token_ids for token_id in sampled])
        if len(token_ids):
            if self._telling is not None:
                self._telling.work.wait()
            self._telling = _Broadcast(self._group.start_token_broadcast(token_ids), token_ids)
        return output


class FollowingRunner(ModelRunner):
    """Computes its part and takes the tokens from the leader."""

    def __init__(
        self,
        backend: ModelBackend,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
        kernels: Kernels,
        group: WorkerGroup,
    ) -> None:
        super().__init__(backend, dtype, device, max_num_seqs, kernels)
        self._group = group
        # Oldest first.
        self._untold: deque[tuple[StepInputs, _Broadcast]] = deque()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        # A row may go to another request once its own has finished.
        needed = scheduler_output.num_scheduled_tokens.keys() | set(scheduler_output.finished_keys)
        while any(needed & _sampled_keys(inputs) for inputs, _ in self._untold):
            self._take_up_oldest()
        super().execute_model(scheduler_output)

    def sample_tokens(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        inputs = self._take_pending().inputs
        self._record().count_computed(inputs)
        if inputs.sampled.size:
            token_ids = torch.zeros(len(inputs.sampled), dtype=torch.int64)
            self._untold.append((inputs, _Broadcast(self._group.start_token_broadcast(token_ids), token_ids)))
        return ModelRunnerOutput(inputs.keys, [[] for _ in inputs.keys])

    def _take_up_oldest(self) -> None:
        inputs, broadcast = self._untold.popleft()
        broadcast.work.wait()
        self._record().append_sampled(inputs, broadcast.token_ids.tolist())

    def _logits_indices(self, inputs: StepInputs) -> np.ndarray:
        return np.zeros(0, dtype=np.int64)

    def _prompt_logprobs(self, inputs: StepInputs) -> dict[RequestKey, PromptLogprobs]:
        return {}

    def _pool(self, inputs: StepInputs) -> dict[RequestKey, bytes]:
        # The leader has the hidden states behind the last layer, whole ones, and tells nobody.
        return {}


def _sampled_keys(inputs: StepInputs) -> set[RequestKey]:
    return {inputs.keys[index] for index in inputs.sampled.tolist()}
