"""What the collector hands out, as messages of the public API. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from frontend.api.logprobs_messages import MAX_ENTRIES_OF_ANSWER, num_entries, to_token_logprobs
from frontend.generation import Generation
from frontend.generation_events import (
    Admitted,
    ChoiceDelta,
    ChoiceFinished,
    CollectorItem,
    FinishReason,
    PromptReady,
    StopMatch,
)
from frontend.input_processor import ProcessedRequest
from stepwire.errors import InvalidRequestError
from stepwire.packed_logprobs import PackedLogprobs
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
    if isinstance(item, PromptReady):
        return pb.GenerateStreamResponse(prompt=_prompt_info(item, generation, processed))
    if isinstance(item, ChoiceDelta):
        message = to_delta(item)
        message.delta.logprobs.extend(to_rows(item.logprobs, generation, processed))
        return message
    finished = pb.GenerateStreamResponse.Finished(choice=item.choice, reason=_REASONS[item.reason])
    if item.stop_match is not None:
        finished.stop_match.CopyFrom(to_stop_match(item.stop_match))
    if is_last:
        finished.usage.CopyFrom(to_usage(generation))
        if processed.output.timings:
            finished.timings.CopyFrom(to_timings(generation))
    return pb.GenerateStreamResponse(finished=finished)


def to_delta(item: ChoiceDelta) -> pb.GenerateStreamResponse:
    """The message of a delta, without log-probabilities. Field by field: half as dear as the constructors."""
    message = pb.GenerateStreamResponse()
    delta = message.delta
    delta.choice = item.choice
    delta.text = item.text
    delta.token_ids.extend(item.token_ids)
    return message


class UnaryAnswer:
    """Collects the items of a request into one answer."""

    def __init__(self, generation: Generation, processed: ProcessedRequest) -> None:
        self._generation = generation
        self._processed = processed
        choices = range(processed.num_choices)
        self._texts: list[list[str]] = [[] for _ in choices]
        self._completions = [pb.GenerateResponse.Completion(choice=choice) for choice in choices]
        self._num_entries = 0
        self._prompt: pb.GenerateStreamResponse.PromptInfo | None = None

    def add(self, items: Sequence[CollectorItem]) -> None:
        """Take the next items, in order. Raises InvalidRequestError when they become too much for one message."""
        self._num_entries += sum(map(num_entries, items))
        if self._num_entries > MAX_ENTRIES_OF_ANSWER:
            raise InvalidRequestError.of_field(
                "output.logprobs", f"more than {MAX_ENTRIES_OF_ANSWER} entries do not fit one answer; stream it"
            )
        for item in items:
            if isinstance(item, ChoiceDelta):
                self._texts[item.choice].append(item.text)
                completion = self._completions[item.choice]
                completion.token_ids.extend(item.token_ids)
                completion.logprobs.extend(to_rows(item.logprobs, self._generation, self._processed))
            elif isinstance(item, PromptReady):
                self._prompt = _prompt_info(item, self._generation, self._processed)
            elif isinstance(item, ChoiceFinished):
                self._finish(item)

    def build(self) -> pb.GenerateResponse:
        """The answer, when every choice has ended."""
        generation, processed = self._generation, self._processed
        for completion, texts in zip(self._completions, self._texts, strict=True):
            completion.text = "".join(texts)
        response = pb.GenerateResponse(
            request_id=generation.request_id,
            completions=self._completions,
            usage=to_usage(generation),
            model=processed.model,
            system_fingerprint=generation.system_fingerprint,
        )
        if self._prompt is not None:
            response.prompt_logprobs.extend(self._prompt.prompt_logprobs)
            response.prompt_token_ids.CopyFrom(self._prompt.prompt_token_ids)
        if processed.output.timings:
            response.timings.CopyFrom(to_timings(generation))
        return response

    def _finish(self, item: ChoiceFinished) -> None:
        completion = self._completions[item.choice]
        completion.reason = _REASONS[item.reason]
        if item.stop_match is not None:
            completion.stop_match.CopyFrom(to_stop_match(item.stop_match))


def to_rows(
    logprobs: PackedLogprobs | None, generation: Generation, processed: ProcessedRequest
) -> Iterable[common_pb2.TokenLogprobs]:
    """The log-probabilities of a delta, if there are any."""
    if logprobs is None:
        return ()
    num_top = processed.output.num_logprobs or 0
    return to_token_logprobs(logprobs, num_top, generation.model.tokenizer.token_bytes)


def _prompt_info(
    item: PromptReady, generation: Generation, processed: ProcessedRequest
) -> pb.GenerateStreamResponse.PromptInfo:
    info = pb.GenerateStreamResponse.PromptInfo(
        prompt_token_ids=common_pb2.TokenIds(ids=processed.prompt_token_ids),
        # Nothing precedes the first token.
        prompt_logprobs=[common_pb2.TokenLogprobs()],
        cached_prompt_tokens=item.cached_prompt_tokens,
    )
    num_top = processed.output.num_prompt_logprobs or 0
    for rows in item.logprobs:
        info.prompt_logprobs.extend(to_token_logprobs(rows, num_top, generation.model.tokenizer.token_bytes))
    return info


def _accepted(generation: Generation, processed: ProcessedRequest) -> pb.GenerateStreamResponse.Accepted:
    return pb.GenerateStreamResponse.Accepted(
        request_id=generation.request_id,
        prompt_tokens=len(processed.prompt_token_ids),
        model=processed.model,
        system_fingerprint=generation.system_fingerprint,
        engine_id=generation.engine_id,
        seed=processed.seed,
    )


def to_stop_match(match: StopMatch) -> common_pb2.StopMatch:
    if match.stop_string is not None:
        return common_pb2.StopMatch(stop_string=match.stop_string)
    if match.stop_token_id is not None:
        return common_pb2.StopMatch(stop_token_id=match.stop_token_id)
    return common_pb2.StopMatch(eos_token_id=match.eos_token_id or 0)


def to_usage(generation: Generation) -> common_pb2.Usage:
    usage = generation.usage
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
    )


def to_timings(generation: Generation) -> common_pb2.Timings:
    timings = generation.timings
    return common_pb2.Timings(
        queued_ns=timings.queued_ns,
        prefill_ns=timings.prefill_ns,
        decode_ns=timings.decode_ns,
        ttft_ns=timings.ttft_ns,
        preemptions=timings.preemptions,
        engine_id=generation.engine_id,
    )
