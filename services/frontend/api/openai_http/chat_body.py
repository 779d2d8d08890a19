"""The body of /v1/chat/completions as a ChatRequest. Pure."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from google.protobuf.struct_pb2 import Struct
from pydantic import Field

from frontend.api.openai_http.fields import GenerationBody, Int32, Part, UInt32
from frontend.chat.messages import MAX_MESSAGES
from frontend.chat.tools import MAX_TOOLS
from stepwire.errors import InvalidRequestError
from stepwire.v1 import chat_service_pb2 as pb
from stepwire.v1 import common_pb2

_ROLES = {
    "system": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
    "developer": pb.ROLE_DEVELOPER,
}
_MODES = {"auto": pb.ToolChoice.MODE_AUTO, "none": pb.ToolChoice.MODE_NONE, "required": pb.ToolChoice.MODE_REQUIRED}


class ImageUrl(Part):
    url: str


class ContentPart(Part):
    type: str
    text: str | None = None
    image_url: ImageUrl | None = None


class FunctionCall(Part):
    name: str
    arguments: str = ""


class ToolCall(Part):
    id: str = ""
    function: FunctionCall


class ChatMessage(Part):
    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(Part):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"]
    function: Function


class FunctionName(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: FunctionName


class ConversationBody(Part):
    """What a prompt is rendered from."""

    model: str | None = None
    messages: list[ChatMessage] = Field(default_factory=list, max_length=MAX_MESSAGES)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def to_conversation(self) -> pb.ChatRequest:
        """The request without anything about its answer. Raises InvalidRequestError."""
        request = pb.ChatRequest(
            model=self.model or "",
            messages=[_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)],
            tools=map(_tool, self.tools or ()),
            tool_choice=_tool_choice(self.tool_choice),
            chat_template=self.chat_template or "",
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
        )
        if self.chat_template_kwargs:
            request.chat_template_kwargs.CopyFrom(_struct(self.chat_template_kwargs))
        return request


class ChatBody(ConversationBody, GenerationBody):
    """OpenAI's chat completion."""

    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    parallel_tool_calls: bool | None = None

    def to_request(self) -> tuple[pb.ChatRequest, dict[str, str]]:
        """The request, and what the caller calls some of its fields. Raises InvalidRequestError."""
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError.of_field("top_logprobs", "only with logprobs: true")
        has_new_name = self.max_completion_tokens is not None
        constraint, names = self.structured_output()
        request = self.to_conversation()
        request.MergeFrom(
            pb.ChatRequest(
                sampling=self.sampling(),
                stop=self.stop_conditions(self.max_completion_tokens if has_new_name else self.max_tokens),
                output=common_pb2.OutputOptions(
                    logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                    skip_special_tokens=self.skip_special_tokens,
                ),
                structured_output=constraint,
                parallel_tool_calls=self.parallel_tool_calls,
                kv=self.kv(),
                priority=self.priority or 0,
            )
        )
        names["output.logprobs"] = "top_logprobs"
        if has_new_name:
            names["stop.max_tokens"] = "max_completion_tokens"
        return request, names


def _message(given: ChatMessage, field: str) -> pb.Message:
    content = [ContentPart(type="text", text=given.content)] if isinstance(given.content, str) else given.content
    return pb.Message(
        role=_ROLES[given.role],
        content=[_part(part, f"{field}.content[{index}]") for index, part in enumerate(content or ())],
        tool_calls=[
            pb.ToolCall(id=call.id, index=index, name=call.function.name, arguments=call.function.arguments)
            for index, call in enumerate(given.tool_calls or ())
        ],
        tool_call_id=given.tool_call_id or "",
        name=given.name or "",
        reasoning=given.reasoning_content or "",
    )


def _part(given: ContentPart, field: str) -> pb.ContentPart:
    if given.type == "text" and given.text is not None:
        return pb.ContentPart(text=given.text)
    if given.type == "image_url" and given.image_url is not None:
        return pb.ContentPart(image_url=given.image_url.url)
    if given.type in ("text", "image_url"):
        raise InvalidRequestError.of_field(f"{field}.{given.type}", "missing")
    raise InvalidRequestError.of_field(
        f"{field}.type", "only text is supported by this server", reason="UNSUPPORTED_FEATURE"
    )


def _tool(given: Tool) -> pb.Tool:
    function = given.function
    return pb.Tool(
        name=function.name,
        description=function.description or "",
        # As text, because a Struct would lose the order of its keys.
        parameters_json="" if function.parameters is None else json.dumps(function.parameters),
        strict=bool(function.strict),
    )


def _tool_choice(given: str | NamedTool | None) -> pb.ToolChoice | None:
    if given is None:
        return None
    if isinstance(given, NamedTool):
        return pb.ToolChoice(function_name=given.function.name)
    return pb.ToolChoice(mode=_MODES[given])


def _struct(values: dict[str, Any]) -> Struct:
    struct = Struct()
    try:
        struct.update(values)
    except (OverflowError, ValueError):
        # Not chained: its text may quote the value.
        raise InvalidRequestError.of_field("chat_template_kwargs", "a value is too large") from None
    return struct
