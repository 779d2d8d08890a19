"""What a scenario may expect of a reply. Each function is a word of `expect` in scenarios.yaml."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from conformance.runners import Reply

Saved = Mapping[str, Reply]


def check(reply: Reply, expect: Mapping[str, Any], saved: Saved) -> None:
    """Every word of `expect` holds; without `code` the call must have ended well."""
    assert reply.code == expect.get("code", "OK"), f"{reply.reason} {reply.message}"
    for word, wanted in expect.items():
        CHECKS[word](reply, wanted, saved)


def text_of(reply: Reply, choice: int = 0) -> str:
    """All text of one choice, whatever the method."""
    return "".join(
        part.text if hasattr(part, "text") else part.content
        for message in reply.messages
        for part in _outputs(message)
        if part.choice == choice
    )


def token_ids_of(reply: Reply) -> list[int]:
    """Output tokens of choice 0."""
    outputs = [part for message in reply.messages for part in _outputs(message) if part.choice == 0]
    return [token_id for part in outputs for token_id in part.token_ids]


def kind(message: Any) -> str:
    """Which event a message of a stream is."""
    return str(message.WhichOneof("event"))


def _outputs(message: Any) -> list[Any]:
    names = message.DESCRIPTOR.fields_by_name
    if "delta" in names:
        return [message.delta] if message.HasField("delta") else []
    if "completions" in names:
        return list(message.completions)
    return [_ChatOutput(choice) for choice in message.choices] if "choices" in names else []


class _ChatOutput:
    """A choice of a unary chat in the shape of a delta."""

    def __init__(self, choice: Any) -> None:
        self.choice = choice.choice
        self.content = "".join(part.text for part in choice.message.content)
        self.token_ids = choice.token_ids
        self.logprobs = choice.logprobs


def value_at(message: Message, path: str) -> Any:
    """The field at a path such as `completions.0.reason`; enums are names. A path that does not exist is an error."""
    value: Any = message
    for part in path.split("."):
        if part.lstrip("-").isdigit():
            value = value[int(part)]
            continue
        descriptor = value.DESCRIPTOR.fields_by_name[part]
        value = getattr(value, part)
        if descriptor.type == FieldDescriptor.TYPE_ENUM:
            value = descriptor.enum_type.values_by_number[value].name
    return value


def _code(reply: Reply, wanted: str, saved: Saved) -> None:
    assert reply.code == wanted


def _reason(reply: Reply, wanted: str, saved: Saved) -> None:
    assert reply.reason == wanted


def _fields(reply: Reply, wanted: list[str], saved: Saved) -> None:
    assert reply.fields == wanted
    assert all(violation["description"] for violation in reply.field_violations)


def _metadata(reply: Reply, wanted: Mapping[str, str], saved: Saved) -> None:
    assert {key: reply.error_metadata.get(key) for key in wanted} == wanted


def _message(reply: Reply, wanted: str, saved: Saved) -> None:
    assert wanted in reply.message


def _kinds(reply: Reply, wanted: list[str], saved: Saved) -> None:
    kinds = [kind(message) for message in reply.messages]
    assert [one for place, one in enumerate(kinds) if place == 0 or kinds[place - 1] != one] == wanted
    assert [message.index for message in reply.messages] == list(range(len(kinds)))


def _num_messages(reply: Reply, wanted: int, saved: Saved) -> None:
    assert len(reply.messages) == wanted


def _num_choices(reply: Reply, wanted: int, saved: Saved) -> None:
    choices = [message.finished.choice for message in reply.messages if kind(message) == "finished"]
    assert sorted(choices) == list(range(wanted))
    assert len({text_of(reply, choice) for choice in choices}) == wanted


def _contains(reply: Reply, wanted: str, saved: Saved) -> None:
    assert wanted in text_of(reply)


def _lacks(reply: Reply, wanted: str, saved: Saved) -> None:
    assert wanted not in text_of(reply)


def _text(reply: Reply, wanted: str, saved: Saved) -> None:
    assert text_of(reply) == wanted


def _same_text(reply: Reply, wanted: str, saved: Saved) -> None:
    assert text_of(reply)
    assert text_of(reply) == text_of(saved[wanted])


def _completes(reply: Reply, wanted: list[str], saved: Saved) -> None:
    """`[start, whole]`: what this call adds to the start makes the whole, in text and in tokens."""
    start, whole = (saved[name] for name in wanted)
    assert token_ids_of(start) + token_ids_of(reply) == token_ids_of(whole)
    assert text_of(start) + text_of(reply) == text_of(whole)


def _values(reply: Reply, wanted: Mapping[str, Any], saved: Saved) -> None:
    """Fields of the last message."""
    assert {path: value_at(reply.messages[-1], path) for path in wanted} == wanted


def _first_values(reply: Reply, wanted: Mapping[str, Any], saved: Saved) -> None:
    """Fields of the first message."""
    assert {path: value_at(reply.messages[0], path) for path in wanted} == wanted


def _trailers(reply: Reply, wanted: Mapping[str, str], saved: Saved) -> None:
    """Trailing metadata, each with words that are in its value."""
    for key, words in wanted.items():
        assert words in reply.trailers.get(key, "")


def _json_keys(reply: Reply, wanted: list[str], saved: Saved) -> None:
    assert sorted(json.loads(text_of(reply))) == sorted(wanted)


def _num_logprobs(reply: Reply, wanted: int, saved: Saved) -> None:
    """Each output token has its bytes, its log-probability and those of the k most likely."""
    outputs = [part for message in reply.messages for part in _outputs(message)]
    rows = [row for part in outputs for row in part.logprobs]
    assert [row.sampled.token_id for row in rows] == token_ids_of(reply)
    assert rows
    assert b"".join(row.sampled.token_bytes for row in rows).decode() == text_of(reply)
    for row in rows:
        assert row.sampled.logprob <= 0
        assert len(row.top) == wanted
        assert row.top[0].rank == 1


def _tool_call(reply: Reply, wanted: Mapping[str, Any], saved: Saved) -> None:
    """`{name, keys}`: one call of this tool, whose arguments are JSON with these keys."""
    name, arguments = "", ""
    for message in reply.messages:
        calls = message.delta.tool_calls if "delta" in message.DESCRIPTOR.fields_by_name else _calls(message)
        for call in calls:
            assert call.index == 0
            name, arguments = name + call.name, arguments + call.arguments
    assert name == wanted["name"]
    assert sorted(json.loads(arguments)) == sorted(wanted["keys"])


def _vectors(reply: Reply, wanted: Mapping[str, Any], saved: Saved) -> None:
    """`{count, dimensions, are_units}`: so many vectors of this size, and whether their length is 1."""
    vectors = [list(embedding.values) for embedding in reply.messages[0].embeddings]
    assert [len(vector) for vector in vectors] == [wanted["dimensions"]] * wanted["count"]
    assert [abs(math.hypot(*vector) - 1) < 1e-4 for vector in vectors] == [wanted["are_units"]] * wanted["count"]


def _text_lengths(reply: Reply, wanted: list[int], saved: Saved) -> None:
    """Characters of each text of a Detokenize."""
    assert [len(text) for text in reply.messages[0].texts] == wanted


def _calls(message: Any) -> Any:
    return message.choices[0].message.tool_calls


CHECKS: dict[str, Callable[[Reply, Any, Saved], None]] = {
    "code": _code,
    "reason": _reason,
    "fields": _fields,
    "error_metadata": _metadata,
    "message": _message,
    "kinds": _kinds,
    "num_messages": _num_messages,
    "num_choices": _num_choices,
    "contains": _contains,
    "lacks": _lacks,
    "text": _text,
    "same_text": _same_text,
    "completes": _completes,
    "values": _values,
    "first_values": _first_values,
    "trailers": _trailers,
    "json_keys": _json_keys,
    "num_logprobs": _num_logprobs,
    "tool_call": _tool_call,
    "vectors": _vectors,
    "text_lengths": _text_lengths,
}
