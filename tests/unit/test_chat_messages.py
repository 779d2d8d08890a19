"""Messages of a ChatRequest: what templates see of them, and what is refused by name."""

from __future__ import annotations

import pytest
from google.protobuf import json_format

from frontend.chat import messages
from frontend.chat.messages import MAX_ARGUMENTS_CHARS, MAX_MESSAGES, read_messages
from frontend.input_processor.field_checks import FieldChecks
from stepwire.errors import InvalidRequestError
from stepwire.v1.chat_service_pb2 import Message


def message(**fields: object) -> Message:
    return json_format.ParseDict(fields, Message())


def user(*texts: str) -> Message:
    return message(role="ROLE_USER", content=[{"text": text} for text in texts])


def call_with(arguments: str) -> dict[str, object]:
    return {"role": "ROLE_ASSISTANT", "tool_calls": [{"name": "f", "arguments": arguments}]}


def read(*messages: Message) -> list[dict[str, object]]:
    checks = FieldChecks()
    result = read_messages(list(messages), checks)
    checks.raise_if_any()
    return result


def test_what_a_template_sees_of_a_conversation_with_calls():
    call = {"id": "c1", "name": "add", "arguments": '{"a": 1, "b": [true]}'}
    assert read(
        message(role="ROLE_SYSTEM", content=[{"text": "Be brief."}]),
        user("one", "two"),
        message(role="ROLE_ASSISTANT", tool_calls=[call], reasoning="Let me add."),
        message(role="ROLE_TOOL", content=[{"text": "3"}], tool_call_id="c1", name="add"),
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [True]}}}
            ],
            "reasoning_content": "Let me add.",
        },
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"},
    ]


def test_a_call_without_arguments():
    (read_message,) = read(message(role="ROLE_ASSISTANT", tool_calls=[{"name": "now"}]))
    assert read_message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"content": [{"text": "x"}]}, "messages[1].role"),
        ({"role": 77, "content": [{"text": "x"}]}, "messages[1].role"),
        ({"role": "ROLE_USER"}, "messages[1].content"),
        ({"role": "ROLE_USER", "content": [{"text": "x"}, {}]}, "messages[1].content[1].part"),
        ({"role": "ROLE_USER", "content": [{"text": "x"}], "reasoning": "hm"}, "messages[1].reasoning"),
        ({"role": "ROLE_USER", "content": [{"text": "x"}], "tool_call_id": "c"}, "messages[1].tool_call_id"),
        ({"role": "ROLE_SYSTEM", "content": [{"text": "x"}], "tool_calls": [{"name": "f"}]}, "messages[1].tool_calls"),
        ({"role": "ROLE_ASSISTANT", "tool_calls": [{"name": ""}]}, "messages[1].tool_calls[0].name"),
        *((call_with(text), "messages[1].tool_calls[0].arguments") for text in ("{", "[]", "[" * 9999)),
    ],
)
def test_wrong_messages_are_named(fields: dict[str, object], field: str):
    with pytest.raises(InvalidRequestError) as caught:
        read(user("hello"), message(**fields))
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.reason == "FIELD_INVALID"


def test_arguments_are_measured_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch):
    parsed: list[str] = []
    monkeypatch.setattr(messages.json, "loads", parsed.append)
    with pytest.raises(InvalidRequestError, match=f"arguments: .* at most {MAX_ARGUMENTS_CHARS}"):
        read(message(**call_with('{"a": "' + "x" * MAX_ARGUMENTS_CHARS + '"}')))
    assert parsed == []


def test_more_messages_than_anybody_has_are_refused():
    with pytest.raises(InvalidRequestError, match=f"messages: .* at most {MAX_MESSAGES}"):
        read(*[user("x")] * (MAX_MESSAGES + 1))


def test_an_empty_conversation_is_refused():
    with pytest.raises(InvalidRequestError, match=r"messages: .*empty"):
        read()


@pytest.mark.parametrize("part", [{"imageUrl": "https://x/y.png"}, {"image": "aGk="}])
def test_images_are_not_supported(part: dict[str, str]):
    with pytest.raises(InvalidRequestError) as caught:
        read(message(role="ROLE_USER", content=[part]))
    assert caught.value.reason == "UNSUPPORTED_FEATURE"
    assert caught.value.violations[0].field.startswith("messages[0].content[0].image")
