"""What the collector hands out, as the GenerateResponses of vLLM's protocol: chunks, then one complete a choice.

Owner: the task of the RPC. Counts of a chunk are those of its own tokens, as the ids are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from frontend.api.compat.logprobs import to_input_logprobs, to_output_logprobs
from frontend.api.logprobs_messages import MAX_ENTRIES_OF_ANSWER, num_entries, size_of
from frontend.generation import Generation
from frontend.generation_events import ChoiceDelta, ChoiceFinished, CollectorItem, FinishReason, PromptReady
from frontend.input_processor import ProcessedRequest
from stepwire.errors import InvalidRequestError
from stepwire.packed_logprobs import PackedLogprobs

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.REPETITION: "stop",
}


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    # Kept for an answer at once only.
    logprobs: list[PackedLogprobs] = field(default_factory=list)


class GenerateAnswer:
    """Turns the items of one request, in order, into messages."""

    def __init__(self, generation: Generation, processed: ProcessedRequest, *, is_stream: bool) -> None:
        self._generation = generation
        self._processed = processed
        self._is_stream = is_stream
        self._choices = [_Choice() for _ in range(processed.num_choices)]
        # Goes out with the first message.
        self._input_logprobs: Any = None
        self._num_entries = 0

    def num_entries(self, item: CollectorItem) -> int:
        """Log-probabilities in the message of an item: what decides where it is made."""
        if isinstance(item, ChoiceFinished):
            return sum(map(size_of, self._choices[item.choice].logprobs))
        return num_entries(item)

    def take(self, item: CollectorItem) -> Any:
        """The message that an item becomes, or None. Raises InvalidRequestError when too much has to be kept."""
        if isinstance(item, PromptReady):
            num_top = self._processed.output.num_prompt_logprobs or 0
            self._input_logprobs = to_input_logprobs(self._processed.prompt_token_ids, item.logprobs, num_top)
        elif isinstance(item, ChoiceDelta):
            return self._take_delta(item)
        elif isinstance(item, ChoiceFinished):
            return pb.GenerateResponse(complete=self._complete(item))
        return None

    def _take_delta(self, delta: ChoiceDelta) -> Any:
        choice = self._choices[delta.choice]
        choice.token_ids.extend(delta.token_ids)
        if not self._is_stream:
            self._keep(choice, delta)
            return None
        # Text alone, held back for a stop string, is nothing to those who get ids.
        if not delta.token_ids:
            return None
        usage = self._generation.usage
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=delta.num_tokens,
            cached_tokens=usage.cached_prompt_tokens,
            output_logprobs=self._output_logprobs([delta.logprobs] if delta.logprobs else []),
            input_logprobs=self._take_input_logprobs(),
            index=delta.choice,
        )
        return pb.GenerateResponse(chunk=chunk)

    def _keep(self, choice: _Choice, delta: ChoiceDelta) -> None:
        if delta.logprobs is None:
            return
        self._num_entries += size_of(delta.logprobs)
        if self._num_entries > MAX_ENTRIES_OF_ANSWER:
            raise InvalidRequestError.of_field(
                "sampling_params.logprobs",
                f"more than {MAX_ENTRIES_OF_ANSWER} entries do not fit one answer; stream it",
            )
        choice.logprobs.append(delta.logprobs)

    def _complete(self, finished: ChoiceFinished) -> Any:
        choice, usage = self._choices[finished.choice], self._generation.usage
        complete = pb.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=_REASONS[finished.reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=finished.num_output_tokens,
            cached_tokens=usage.cached_prompt_tokens,
            output_logprobs=self._output_logprobs(choice.logprobs),
            input_logprobs=self._take_input_logprobs(),
            index=finished.choice,
        )
        match = finished.stop_match
        if match is not None and match.stop_token_id is not None:
            complete.matched_token_id = match.stop_token_id
        elif match is not None and match.stop_string is not None:
            complete.matched_stop_str = match.stop_string
        return complete

    def _output_logprobs(self, parts: Sequence[PackedLogprobs]) -> Any:
        return to_output_logprobs(parts, self._processed.output.num_logprobs or 0) if parts else None

    def _take_input_logprobs(self) -> Any:
        taken, self._input_logprobs = self._input_logprobs, None
        return taken
