"""The texts of a delta, and how those that were delivered before are cut off the beginning of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

from stepwire.v1 import chat_service_pb2, generation_service_pb2

Delta: TypeAlias = generation_service_pb2.GenerateStreamResponse.Delta | chat_service_pb2.ChatStreamResponse.Delta


def lengths(delta: Delta) -> Counter[str]:
    """Characters of each text of a delta, by a name that is the same in every delta."""
    return Counter({name: len(getattr(owner, field)) for name, owner, field in _texts(delta)})


def cut(delta: Delta, num_delivered: Counter[str]) -> None:
    """Take delivered characters off the texts, and what was taken off the counts."""
    for name, owner, field in _texts(delta):
        text = getattr(owner, field)
        num_chars = min(num_delivered[name], len(text))
        setattr(owner, field, text[num_chars:])
        num_delivered[name] -= num_chars


def drop_known_calls(delta: Delta, known: set[int]) -> None:
    """Leave out the beginnings of calls that have begun, by their index: repeated, they would have other ids."""
    if isinstance(delta, generation_service_pb2.GenerateStreamResponse.Delta):
        return
    for call in delta.tool_calls:
        if call.index in known:
            call.id = call.name = ""
    calls = [call for call in delta.tool_calls if call.id or call.name or call.arguments]
    del delta.tool_calls[:]
    delta.tool_calls.extend(calls)
    known.update(call.index for call in calls)


def is_empty(delta: Delta) -> bool:
    """Nothing is left that a caller could want."""
    has_calls = isinstance(delta, chat_service_pb2.ChatStreamResponse.Delta) and len(delta.tool_calls) > 0
    return not (delta.token_ids or delta.logprobs or has_calls or +lengths(delta))


def _texts(delta: Delta) -> Iterator[tuple[str, Any, str]]:
    if isinstance(delta, generation_service_pb2.GenerateStreamResponse.Delta):
        yield "text", delta, "text"
        return
    yield "content", delta, "content"
    yield "reasoning", delta, "reasoning"
    for call in delta.tool_calls:
        yield f"arguments {call.index}", call, "arguments"
