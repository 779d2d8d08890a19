"""The text of one choice told apart: content, reasoning, calls. Pure; owned by the handler of the request."""

from __future__ import annotations

import math
from collections.abc import Iterable

from frontend.chat.events import ChatDelta, ChatEvent, ChatFinished, ChatFinishReason
from frontend.generation_events import ChoiceDelta, ChoiceFinished, FinishReason
from frontend.output_parsers.interface import (
    ContentDelta,
    OutputDelta,
    OutputParser,
    ReasoningDelta,
    ToolCallDelta,
)


class ChoiceAnswer:
    """Takes the events of a choice in order. Without a parser all text is content."""

    def __init__(self, choice: int, parser: OutputParser | None, *, is_parallel: bool) -> None:
        self._choice = choice
        self._parser = parser
        self._is_parallel = is_parallel
        # Tokens whose text is held back by the parser, and which nobody has heard of.
        self._num_silent = 0
        self.num_reasoning_tokens = 0
        # Of the text so far, as the parser had it.
        self._num_reasoning_chars = 0
        self._num_skipped_chars = 0
        # The part of it of which that is not known, and the tokens behind it.
        self._num_open_chars = 0
        self._num_open_tokens = 0

    def skip(self, text: str) -> None:
        """Take text that an earlier stream has delivered."""
        if self._parser is not None:
            self._parser.feed(text)
            self._num_skipped_chars += len(text)
            num_chars = self._parser.num_reasoning_chars
            # Until that is known it may all be reasoning, which counted then.
            self._num_reasoning_chars = self._num_skipped_chars if num_chars is None else num_chars

    def take(self, item: ChoiceDelta) -> ChatDelta | None:
        """The news in a delta; None when there is nothing to say yet."""
        if self._parser is None:
            return ChatDelta(self._choice, item.text, "", (), item.token_ids, item.num_tokens, item.logprobs)
        content, reasoning, calls = self._sort(self._parser.feed(item.text))
        self._count_reasoning(item, self._parser.num_reasoning_chars)
        if not (content or reasoning or calls or item.token_ids or item.logprobs):
            self._num_silent += item.num_tokens
            return None
        num_tokens, self._num_silent = self._num_silent + item.num_tokens, 0
        return ChatDelta(self._choice, content, reasoning, calls, item.token_ids, num_tokens, item.logprobs)

    def finish(self, item: ChoiceFinished) -> list[ChatEvent]:
        """What was held back, and the end."""
        events: list[ChatEvent] = []
        reason = ChatFinishReason(item.reason.value)
        if self._parser is not None:
            content, reasoning, calls = self._sort(self._parser.finish())
            if content or reasoning or calls:
                events.append(ChatDelta(self._choice, content, reasoning, calls, (), self._num_silent))
            if item.reason is FinishReason.STOP and self._parser.tool_calls:
                reason = ChatFinishReason.TOOL_CALLS
        return [*events, ChatFinished(self._choice, reason, item.stop_match)]

    def _count_reasoning(self, item: ChoiceDelta, num_reasoning_chars: int | None) -> None:
        """By the share of the text, because a delta may cross a border; a token that does counts."""
        self._num_open_chars += len(item.text)
        self._num_open_tokens += item.num_tokens
        if num_reasoning_chars is None or not self._num_open_chars:
            # Tokens without text go with those that follow.
            return
        num_chars = max(0, num_reasoning_chars - self._num_reasoning_chars)
        self.num_reasoning_tokens += math.ceil(self._num_open_tokens * num_chars / self._num_open_chars)
        self._num_reasoning_chars = num_reasoning_chars
        self._num_open_chars = self._num_open_tokens = 0

    def _sort(self, deltas: Iterable[OutputDelta]) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        content, reasoning, calls = "", "", []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                content += delta.text
            elif isinstance(delta, ReasoningDelta):
                reasoning += delta.text
            elif self._is_parallel or delta.index == 0:
                # Where the model goes on with another call all the same, the caller has asked not to see it.
                calls.append(delta)
        return content, reasoning, tuple(calls)
