"""The conversation of /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from frontend.api.answering import rank_of
from frontend.api.logprobs_messages import size_of, to_token_logprobs
from frontend.api.openai_http.call import HttpCall
from frontend.api.openai_http.logprobs import ChatLogprobs
from frontend.api.openai_http.run import Choice, Run, finish_reason, stop_reason
from frontend.chat.events import ChatDelta, ChatEvent, ChatFinished
from frontend.chat.service import Chat
from frontend.llm_frontend import LLMFrontend
from frontend.output_parsers.interface import ToolCallDelta
from stepwire.v1.chat_service_pb2 import ChatRequest


class ChatRun(Run[ChatEvent]):
    """A ChatRequest, and its events as parts of OpenAI's choices."""

    chat: Chat

    def __init__(self, frontend: LLMFrontend, call: HttpCall, request_id: str, request: ChatRequest) -> None:
        super().__init__(frontend, call, request_id, first_choice=0)
        self._request = request
        # Choices whose role was said.
        self._begun: set[int] = set()
        self._logprobs_of: defaultdict[int, ChatLogprobs] = defaultdict(ChatLogprobs)

    async def submit(self) -> None:
        self.chat = await Chat.submit(
            self.generation, self._request, client_class=self.generation.caller.client_class, rank=rank_of(self.call)
        )

    async def next(self) -> Sequence[ChatEvent]:
        return await self.chat.next()

    def num_entries(self, events: Sequence[ChatEvent]) -> int:
        return sum(size_of(event.logprobs) for event in events if isinstance(event, ChatDelta))

    @property
    def num_reasoning_tokens(self) -> int:
        return self.chat.num_reasoning_tokens

    def to_choices(self, events: Sequence[ChatEvent]) -> Iterator[Choice]:
        for event in events:
            if isinstance(event, ChatDelta):
                yield from self._begin(event.choice)
                yield _part(event.choice, _delta(event), logprobs=self._logprobs(event))
            elif isinstance(event, ChatFinished):
                yield from self._begin(event.choice)
                yield _part(
                    event.choice,
                    {},
                    finish_reason=finish_reason(event.reason.value),
                    stop_reason=stop_reason(event.stop_match),
                )

    def _begin(self, choice: int) -> Iterator[Choice]:
        if choice not in self._begun:
            self._begun.add(choice)
            yield _part(choice, {"role": "assistant", "content": ""})

    def _logprobs(self, event: ChatDelta) -> dict[str, Any] | None:
        if event.logprobs is None:
            return None
        num_top = self.chat.processed.output.num_logprobs or 0
        rows = to_token_logprobs(event.logprobs, num_top, self.generation.model.tokenizer.token_bytes)
        return self._logprobs_of[event.choice].of(rows)


def _part(choice: int, delta: dict[str, Any], **changed: Any) -> Choice:
    empty = {"logprobs": None, "finish_reason": None, "stop_reason": None}
    return {"index": choice, "delta": delta, **empty, **changed}


def _delta(event: ChatDelta) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if event.content:
        delta["content"] = event.content
    if event.reasoning:
        delta["reasoning_content"] = event.reasoning
    if event.tool_calls:
        delta["tool_calls"] = [_call(call) for call in event.tool_calls]
    return delta


def _call(given: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": given.arguments}
    if not given.id:
        return {"index": given.index, "function": function}
    return {"index": given.index, "id": given.id, "type": "function", "function": {"name": given.name, **function}}
