"""What the collector hands out, as messages of the public API. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.generation import Generation
from frontend.generation_events import (
    Admitted,
    ChoiceDelta,
    ChoiceFinished,
    CollectorItem,
    FinishReason,
    StopMatch,
)
from frontend.input_processor import ProcessedRequest
from stepwire.v1 import common_pb2
from stepwire.v1 import generation_service_pb2 as pb

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.REPETITION: common_pb2.FINISH_REASON_REPETITION,
}


def to_message(
    item: CollectorItem, generation: Generation, processed: ProcessedRequest, *, is_last: bool
) -> pb.GenerateStreamResponse:
    """The stream message of one item. Usage and timings are on the last one only."""
    if isinstance(item, Admitted):
        return pb.GenerateStreamResponse(accepted=_accepted(generation, processed))
    if isinstance(item, ChoiceDelta):
        delta = pb.GenerateStreamResponse.Delta(choice=item.choice, text=item.text, token_ids=item.token_ids)
        return pb.GenerateStreamResponse(delta=delta)
    finished = pb.GenerateStreamResponse.Finished(choice=item.choice, reason=_REASONS[item.reason])
    if item.stop_match is not None:
        finished.stop_match.CopyFrom(_stop_match(item.stop_match))
    if is_last:
        finished.usage.CopyFrom(_usage(generation))
        if processed.output.timings:
            finished.timings.CopyFrom(_timings(generation))
    return pb.GenerateStreamResponse(finished=finished)


class UnaryAnswer:
    """Collects the items of a request into one answer."""

    def __init__(self, num_choices: int) -> None:
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._completions = [pb.GenerateResponse.Completion(choice=choice) for choice in range(num_choices)]

    def add(self, items: Sequence[CollectorItem]) -> None:
        """Take the next items, in order."""
        for item in items:
            if isinstance(item, ChoiceDelta):
                self._texts[item.choice].append(item.text)
                self._completions[item.choice].token_ids.extend(item.token_ids)
            elif isinstance(item, ChoiceFinished):
                self._finish(item)

    def build(self, generation: Generation, processed: ProcessedRequest) -> pb.GenerateResponse:
        """The answer, when every choice has ended."""
        for completion, texts in zip(self._completions, self._texts, strict=True):
            completion.text = "".join(texts)
        response = pb.GenerateResponse(
            request_id=generation.request_id,
            completions=self._completions,
            usage=_usage(generation),
            model=processed.model,
            system_fingerprint=generation.system_fingerprint,
        )
        if processed.output.timings:
            response.timings.CopyFrom(_timings(generation))
        return response

    def _finish(self, item: ChoiceFinished) -> None:
        completion = self._completions[item.choice]
        completion.reason = _REASONS[item.reason]
        if item.stop_match is not None:
            completion.stop_match.CopyFrom(_stop_match(item.stop_match))


def _accepted(generation: Generation, processed: ProcessedRequest) -> pb.GenerateStreamResponse.Accepted:
    return pb.GenerateStreamResponse.Accepted(
        request_id=generation.request_id,
        prompt_tokens=len(processed.prompt_token_ids),
        model=processed.model,
        system_fingerprint=generation.system_fingerprint,
        engine_id=generation.engine_id,
        seed=processed.seed,
    )


def _stop_match(match: StopMatch) -> common_pb2.StopMatch:
    if match.stop_string is not None:
        return common_pb2.StopMatch(stop_string=match.stop_string)
    if match.stop_token_id is not None:
        return common_pb2.StopMatch(stop_token_id=match.stop_token_id)
    return common_pb2.StopMatch(eos_token_id=match.eos_token_id or 0)


def _usage(generation: Generation) -> common_pb2.Usage:
    usage = generation.usage
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )


def _timings(generation: Generation) -> common_pb2.Timings:
    timings = generation.timings
    return common_pb2.Timings(
        queued_ns=timings.queued_ns,
        prefill_ns=timings.prefill_ns,
        decode_ns=timings.decode_ns,
        ttft_ns=timings.ttft_ns,
        preemptions=timings.preemptions,
        engine_id=generation.engine_id,
    )
