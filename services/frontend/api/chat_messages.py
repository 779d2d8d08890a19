"""The events of a chat as messages of the public API. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from frontend.api.generation_messages import to_rows, to_stop_match, to_timings, to_usage
from frontend.api.logprobs_messages import MAX_ENTRIES_OF_ANSWER, size_of
from frontend.chat.events import ChatDelta, ChatEvent, ChatFinished, ChatFinishReason
from frontend.chat.service import Chat
from frontend.generation_events import Admitted
from frontend.output_parsers.interface import ToolCallDelta
from stepwire.errors import InvalidRequestError
from stepwire.v1 import chat_service_pb2 as pb
from stepwire.v1 import common_pb2

_REASONS = {
    ChatFinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    ChatFinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    ChatFinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
    ChatFinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    ChatFinishReason.REPETITION: common_pb2.FINISH_REASON_REPETITION,
}


def num_entries(events: Iterable[ChatEvent]) -> int:
    """Log-probabilities among the events: what decides where they are converted."""
    return sum(size_of(event.logprobs) for event in events if isinstance(event, ChatDelta))


def to_message(event: ChatEvent, chat: Chat, *, is_last: bool) -> pb.ChatStreamResponse:
    """The stream message of one event. Usage and timings are on the last one only."""
    if isinstance(event, Admitted):
        return pb.ChatStreamResponse(accepted=_accepted(chat))
    if isinstance(event, ChatDelta):
        delta = pb.ChatStreamResponse.Delta(
            choice=event.choice,
            content=event.content,
            reasoning=event.reasoning,
            tool_calls=map(_tool_call, event.tool_calls),
            token_ids=event.token_ids,
            logprobs=to_rows(event.logprobs, chat.generation, chat.processed),
        )
        return pb.ChatStreamResponse(delta=delta)
    finished = pb.ChatStreamResponse.Finished(choice=event.choice, reason=_REASONS[event.reason])
    if event.stop_match is not None:
        finished.stop_match.CopyFrom(to_stop_match(event.stop_match))
    if is_last:
        finished.usage.CopyFrom(_usage(chat))
        if chat.processed.output.timings:
            finished.timings.CopyFrom(to_timings(chat.generation))
    return pb.ChatStreamResponse(finished=finished)


class UnaryChatAnswer:
    """Collects the events of a chat into one answer."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        choices = range(chat.processed.num_choices)
        self._choices = [pb.ChatResponse.Choice(choice=choice) for choice in choices]
        self._contents: list[list[str]] = [[] for _ in choices]
        self._reasonings: list[list[str]] = [[] for _ in choices]
        self._calls: list[dict[int, list[ToolCallDelta]]] = [{} for _ in choices]
        self._num_entries = 0

    def add(self, events: Sequence[ChatEvent]) -> None:
        """Take the next events, in order. Raises InvalidRequestError when they become too much for one message."""
        self._num_entries += num_entries(events)
        if self._num_entries > MAX_ENTRIES_OF_ANSWER:
            raise InvalidRequestError.of_field(
                "output.logprobs", f"more than {MAX_ENTRIES_OF_ANSWER} entries do not fit one answer; stream it"
            )
        for event in events:
            if isinstance(event, ChatDelta):
                self._add_delta(event)
            elif isinstance(event, ChatFinished):
                choice = self._choices[event.choice]
                choice.reason = _REASONS[event.reason]
                if event.stop_match is not None:
                    choice.stop_match.CopyFrom(to_stop_match(event.stop_match))

    def build(self) -> pb.ChatResponse:
        """The answer, when every choice has ended."""
        chat = self._chat
        for index, choice in enumerate(self._choices):
            choice.message.CopyFrom(self._message(index))
        response = pb.ChatResponse(
            request_id=chat.generation.request_id,
            choices=self._choices,
            usage=_usage(chat),
            model=chat.processed.model,
            system_fingerprint=chat.generation.system_fingerprint,
        )
        if chat.processed.output.timings:
            response.timings.CopyFrom(to_timings(chat.generation))
        return response

    def _add_delta(self, event: ChatDelta) -> None:
        choice = self._choices[event.choice]
        choice.token_ids.extend(event.token_ids)
        choice.logprobs.extend(to_rows(event.logprobs, self._chat.generation, self._chat.processed))
        self._contents[event.choice].append(event.content)
        self._reasonings[event.choice].append(event.reasoning)
        for call in event.tool_calls:
            self._calls[event.choice].setdefault(call.index, []).append(call)

    def _message(self, index: int) -> pb.Message:
        content = "".join(self._contents[index])
        return pb.Message(
            role=pb.ROLE_ASSISTANT,
            content=[pb.ContentPart(text=content)] if content else [],
            reasoning="".join(self._reasonings[index]),
            tool_calls=[_whole_call(parts) for _, parts in sorted(self._calls[index].items())],
        )


def _whole_call(parts: Sequence[ToolCallDelta]) -> pb.ToolCall:
    """Id and name are in the first part, which a broken stream may have had."""
    call = _tool_call(parts[0])
    call.arguments = "".join(part.arguments for part in parts)
    return call


def _tool_call(delta: ToolCallDelta) -> pb.ToolCall:
    return pb.ToolCall(id=delta.id, index=delta.index, name=delta.name, arguments=delta.arguments)


def _accepted(chat: Chat) -> pb.ChatStreamResponse.Accepted:
    generation, processed = chat.generation, chat.processed
    return pb.ChatStreamResponse.Accepted(
        request_id=generation.request_id,
        prompt_tokens=len(processed.prompt_token_ids),
        model=processed.model,
        system_fingerprint=generation.system_fingerprint,
        engine_id=generation.engine_id,
        seed=processed.seed,
    )


def _usage(chat: Chat) -> common_pb2.Usage:
    usage = to_usage(chat.generation)
    usage.reasoning_tokens = chat.num_reasoning_tokens
    return usage
