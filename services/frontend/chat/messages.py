"""The messages of a ChatRequest as what templates are written for: dictionaries in the shape of the field. Pure.

Images are refused by name; a multi-part text is joined by line feeds, as templates for text models expect one string.
"""

from __future__ import annotations

import json
from typing import Any

from frontend.input_processor.field_checks import FieldChecks
from stepwire.v1 import chat_service_pb2 as pb

# Objects are made of each.
MAX_MESSAGES = 16 * 1024
# Of one call, in characters of JSON: parsing holds the interpreter.
MAX_ARGUMENTS_CHARS = 256 * 1024
_ROLES: dict[int, str] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
    pb.ROLE_DEVELOPER: "developer",
}
_UNSUPPORTED = "UNSUPPORTED_FEATURE"


def read_messages(messages: list[pb.Message], checks: FieldChecks) -> list[dict[str, Any]]:
    """One dictionary a message; what is wrong goes to `checks`, and the result is then not to be used."""
    checks.require(bool(messages), "messages", "the conversation is empty")
    count = len(messages)
    if not checks.require(count <= MAX_MESSAGES, "messages", f"{count} messages, at most {MAX_MESSAGES} are allowed"):
        return []
    return [_read_message(message, f"messages[{index}]", checks) for index, message in enumerate(messages)]


def _read_message(message: pb.Message, field: str, checks: FieldChecks) -> dict[str, Any]:
    role = _ROLES.get(message.role, "")
    checks.require(bool(role), f"{field}.role", f"{message.role} is no role")
    read: dict[str, Any] = {"role": role, "content": _read_content(message, field, checks)}
    if message.name:
        read["name"] = message.name
    is_assistant = message.role == pb.ROLE_ASSISTANT
    if not is_assistant:
        checks.require(bool(message.content), f"{field}.content", "the message has no content")
        checks.require(not message.tool_calls, f"{field}.tool_calls", "only the assistant makes calls")
        checks.require(not message.reasoning, f"{field}.reasoning", "only the assistant reasons")
    if message.tool_calls:
        read["tool_calls"] = [
            _read_call(call, f"{field}.tool_calls[{index}]", checks) for index, call in enumerate(message.tool_calls)
        ]
    if message.reasoning:
        read["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        is_tool = message.role == pb.ROLE_TOOL
        checks.require(is_tool, f"{field}.tool_call_id", "only a message of a tool answers a call")
        read["tool_call_id"] = message.tool_call_id
    return read


def _read_content(message: pb.Message, field: str, checks: FieldChecks) -> str:
    texts = []
    for index, part in enumerate(message.content):
        kind = part.WhichOneof("part")
        if kind == "text":
            texts.append(part.text)
        elif kind is None:
            checks.add(f"{field}.content[{index}].part", "neither text nor an image is set")
        else:
            what = "the model takes no images"
            checks.add(f"{field}.content[{index}].{kind}", what, reason=_UNSUPPORTED)
    return "\n".join(texts)


def _read_call(call: pb.ToolCall, field: str, checks: FieldChecks) -> dict[str, Any]:
    checks.require(bool(call.name), f"{field}.name", "the name is empty")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": _read_arguments(call.arguments, f"{field}.arguments", checks)},
    }


def _read_arguments(text: str, field: str, checks: FieldChecks) -> object:
    """Templates write the arguments as JSON themselves. No text is no arguments."""
    too_long = f"{len(text)} characters, at most {MAX_ARGUMENTS_CHARS} are allowed"
    if not checks.require(len(text) <= MAX_ARGUMENTS_CHARS, field, too_long):
        return None
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    checks.require(isinstance(arguments, dict), field, "not the JSON text of an object")
    return arguments
