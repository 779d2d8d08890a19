"""A conversation as the prompt its model was trained on, and what the prompt says about the output that follows it.

Templates take long, and those of callers as long as they like: for the tokenizer's threads, never for the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from frontend.chat_template import ChatTemplate
from stepwire.errors import InvalidRequestError

_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is given. `is_continued`: the last message is the beginning of the answer."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[Mapping[str, object]]
    variables: Mapping[str, object]
    add_generation_prompt: bool = True
    is_continued: bool = False


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The text, to be encoded without adding special tokens; the output begins inside or behind the reasoning."""

    text: str
    is_reasoning_open: bool
    is_reasoning_over: bool


def render(template: ChatTemplate, conversation: Conversation) -> RenderedPrompt:
    """Raises InvalidRequestError when the template and the conversation do not fit."""
    messages = [_known_to(template, message) for message in conversation.messages]
    if conversation.is_continued:
        return _render_continued(template, messages, conversation)
    text = _render(template, messages, conversation)
    end = text.rstrip()
    return RenderedPrompt(text, end.endswith(_THINK), end.endswith(_END_THINK))


def _render_continued(
    template: ChatTemplate, messages: list[dict[str, Any]], conversation: Conversation
) -> RenderedPrompt:
    """Render with a mark behind the last message, and end the prompt there.

    To look for the message itself would fail where a template trims it, and where the same text stands twice.
    """
    content = messages[-1]["content"]
    mark = secrets.token_hex(16)
    text, found, _ = _render(
        template, [*messages[:-1], {**messages[-1], "content": content + mark}], conversation
    ).rpartition(mark)
    if not found:
        raise InvalidRequestError.of_field(
            "continue_final_message", "the chat template leaves out the message that is to be continued"
        )
    is_open = content.rfind(_THINK) > content.rfind(_END_THINK)
    return RenderedPrompt(text, is_open, not is_open)


def _render(template: ChatTemplate, messages: Sequence[dict[str, Any]], conversation: Conversation) -> str:
    return template.render(
        messages,
        add_generation_prompt=conversation.add_generation_prompt,
        # Templates ask whether there are any by asking whether they are none.
        tools=conversation.tools or None,
        variables=conversation.variables,
    )


def _known_to(template: ChatTemplate, message: dict[str, Any]) -> dict[str, Any]:
    """Few templates know developers, whose messages are those of the system elsewhere."""
    if message["role"] == "developer" and "developer" not in (template.source or ""):
        return {**message, "role": "system"}
    return message
