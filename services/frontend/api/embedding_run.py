"""An EmbedRequest from the door to its vectors, for every protocol: each input is a request of its own, all at once.

Owner: the task of the call, on the event loop. The first input that fails ends all, and so does the end of the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.api.answering import HasMetadata, caller_of, client_class_of, rank_of
from frontend.call_trace import name_call
from frontend.chat.preparation import with_fields
from frontend.generation import Generation
from frontend.generation_events import ChoiceFinished, FinishReason, Usage
from frontend.input_processor.embedding import PooledPrompts, read_embed_request
from frontend.llm_frontend import LLMFrontend
from stepwire.errors import FieldViolation, InvalidRequestError, RequestFailedError, StepwireError
from stepwire.v1.embedding_service_pb2 import EmbedRequest

# Fields of a prompt that are those of its input; all others are said once for the call.
_INPUT_FIELDS = ("text", "token_ids", "prompt")


@dataclass(frozen=True, slots=True)
class Vector:
    """The answer to one input."""

    # float32, little-endian.
    values: bytes
    usage: Usage
    engine_id: str


@dataclass(frozen=True, slots=True)
class Embedded:
    """The answers in the order of the inputs; at least one."""

    model: str
    vectors: Sequence[Vector]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(vector.usage.prompt_tokens for vector in self.vectors)

    @property
    def num_cached_tokens(self) -> int:
        return sum(vector.usage.cached_prompt_tokens for vector in self.vectors)


class EmbeddingRun:
    """`run` once. `rank` None = as the metadata says."""

    def __init__(
        self,
        frontend: LLMFrontend,
        context: HasMetadata,
        request_id: str,
        deadline_in_s: float | None,
        rank: int | None = None,
    ) -> None:
        self.request_id = request_id
        self._frontend = frontend
        self._caller, self._client_class = caller_of(context), client_class_of(context)
        self._rank = rank_of(context) if rank is None else rank
        self._deadline_in_s = deadline_in_s

    async def run(self, request: EmbedRequest) -> Embedded:
        """Raises StepwireError that names an input by its index."""
        # First of all: a stranger is told nothing about the model.
        self._frontend.gate.identify(self._caller, self._client_class)
        model = self._frontend.model
        model.input_processor.check_model(request.model)
        asked = read_embed_request(
            request, model.input_processor.facts, self._frontend.settings.max_concurrent_requests
        )
        self._frontend.check_batch(self._caller, self._client_class, "inputs", len(asked.prompts))
        if len(asked.prompts) == 1:
            vectors = [await self._embed(asked, 0, self.request_id)]
        else:
            vectors = await self._embed_all(asked)
        return Embedded(model.facts.model, vectors)

    async def _embed_all(self, asked: PooledPrompts) -> list[Vector]:
        name_call(self.request_id)
        failed: list[StepwireError] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._embed(asked, index, f"{self.request_id}-{index}"))
                    for index in range(len(asked.prompts))
                ]
        except* StepwireError as errors:
            failed.extend(error for error in errors.exceptions if isinstance(error, StepwireError))
        if failed:
            raise failed[0]
        return [task.result() for task in tasks]

    async def _embed(self, asked: PooledPrompts, index: int, own_id: str) -> Vector:
        async with self._frontend.generation(
            own_id, caller=self._caller, client_class=self._client_class, deadline_in_s=self._deadline_in_s
        ) as generation:
            try:
                processed = await generation.model.input_processor.process(
                    asked.prompts[index],
                    request_id=own_id,
                    client_class=generation.caller.client_class,
                    deadline_in_s=self._deadline_in_s,
                    pooling=asked.pooling,
                )
                generation.submit(processed, self._rank)
            except InvalidRequestError as error:
                raise with_fields(error, [_of_input(index, item) for item in error.violations]) from error
            return Vector(await _vector_of(generation), generation.usage, generation.engine_id)


async def _vector_of(generation: Generation) -> bytes:
    pooled = b""
    while items := await generation.next():
        for item in items:
            if isinstance(item, ChoiceFinished):
                if item.reason is FinishReason.CANCELLED:
                    raise RequestFailedError("aborted by the caller", reason="CANCELLED")
                pooled = item.pooled
    if not pooled:
        raise RequestFailedError("the engine gave no vector for this input")
    return pooled


def _of_input(index: int, violation: FieldViolation) -> FieldViolation:
    is_own = violation.field.startswith(_INPUT_FIELDS)
    return FieldViolation(f"inputs[{index}].{violation.field}", violation.description) if is_own else violation
